"""Errors of the schedulers, by what the caller does next."""

from collections.abc import Callable

from scheduler.ids import RequestId
from scheduler.story import StoryLine


class SchedulerError(RuntimeError):
    """Base of all; the scheduler is unchanged when one is raised by a command."""


class CommandRejected(SchedulerError):
    """This command can't be accepted: change the request or use another id."""


class StaleIncarnation(SchedulerError):
    """The command was meant for an earlier life of this node: what it addresses is gone. Ask for the inventory."""


class StepInFlight(SchedulerError):
    """A step is launched and not settled: apply the command at the boundary."""


class InvariantBroken(SchedulerError):
    """A bug of ours: block accounting or state no longer adds up. Stop the node.

    request_id: the request at which it was noticed, None if it is nobody's. story: what happened to that one, oldest
    first.
    """

    def __init__(self, message: str, request_id: RequestId | None = None, story: tuple[StoryLine, ...] = ()) -> None:
        told = f"{request_id}: {message}" if request_id else message
        super().__init__("\n  ".join([told, *map(str, story)]))
        self.message = message
        self.request_id = request_id
        self.story = story

    def with_story(self, story_of: Callable[[RequestId], tuple[StoryLine, ...]]) -> "InvariantBroken":
        """The same with the story of its request, if it has none yet."""
        if self.request_id is None or self.story:
            return self
        return InvariantBroken(self.message, self.request_id, story_of(self.request_id))
