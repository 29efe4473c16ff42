"""A request's story: its own log of transitions, bounded, for internal errors and for `prelay story`.

Steps are not noted, only changes: a request that decodes ten thousand tokens in peace has the story of one that
decodes two.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass

from scheduler.ids import RequestId

MAX_LINES = 48
"""Lines kept of one request; the oldest go first."""
MAX_ENDED = 512
"""Requests whose story is kept after they ended."""


@dataclass(frozen=True, slots=True)
class StoryLine:
    """at: seconds of the scheduler's clock. step: steps settled before. tokens: known tokens of the request then."""

    at: float
    step: int
    tokens: int
    what: str

    def __str__(self) -> str:
        return f"{self.at:.3f} step {self.step} tokens {self.tokens}: {self.what}"


class StoryBook:
    """The stories of the requests that are here, and of the last ones that were."""

    def __init__(self, max_lines: int = MAX_LINES, max_ended: int = MAX_ENDED) -> None:
        self._max_lines = max_lines
        self._max_ended = max_ended
        self._live: dict[RequestId, deque[tuple[float, int, int, str]]] = {}
        self._ended: OrderedDict[RequestId, deque[tuple[float, int, int, str]]] = OrderedDict()

    def note(self, request_id: RequestId, at: float, step: int, tokens: int, what: str) -> None:
        lines = self._live.get(request_id)
        if lines is None:
            # An id that comes again goes on with its old story: that is what a puzzled reader wants to see.
            known = self._ended.pop(request_id) if request_id in self._ended else deque(maxlen=self._max_lines)
            lines = self._live[request_id] = known
        lines.append((at, step, tokens, what))

    def end(self, request_id: RequestId) -> None:
        """Nothing more will happen to it."""
        lines = self._live.pop(request_id, None)
        if lines is None:
            return
        self._ended[request_id] = lines
        if len(self._ended) > self._max_ended:
            self._ended.popitem(last=False)

    def of(self, request_id: RequestId) -> tuple[StoryLine, ...]:
        """Oldest first; empty if nothing is known."""
        lines = self._live.get(request_id) or self._ended.get(request_id) or ()
        return tuple(StoryLine(*line) for line in lines)
