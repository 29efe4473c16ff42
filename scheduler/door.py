"""The way into a scheduler: a bug that shows inside is told with the story of the request at which it was noticed."""

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from scheduler.errors import InvariantBroken
from scheduler.ids import RequestId
from scheduler.story import StoryLine


class Storyteller(Protocol):
    def story(self, request_id: RequestId, /) -> tuple[StoryLine, ...]: ...


S = TypeVar("S", bound=Storyteller)
P = ParamSpec("P")
T = TypeVar("T")


def door(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorates a public method whose InvariantBroken gets its request's story."""

    @wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(self, *args, **kwargs)
        except InvariantBroken as error:
            raise error.with_story(self.story) from error

    return call
