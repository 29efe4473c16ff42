"""Is a silent peer still there? The bookkeeping for one peer; the time is an argument.

UCX doesn't tell of a dead peer on shared memory, and of a stopped one on no lane. So whoever waits for a peer asks
it now and then, and gives it up when it has been silent for too long. Only the time in which this node was there to
hear counts: a gap between two checks (this process was stopped, or its threads kept this one from running) counts as
one question's time at most.
"""

from enum import Enum, auto

PEER_SILENCE_S = 3.0
"""A peer with pending operations that is silent for so long is given up. Far above what a busy interpreter delays a
transport's thread: 5 ms for each thread that wants to run."""
QUESTIONS = 6
"""How often a silent peer is asked before it is given up, less one."""


class Verdict(Enum):
    WAIT = auto()
    ASK = auto()
    LOST = auto()


class Liveness:
    """One peer's silence. `check` it several times in `silence_s / QUESTIONS`."""

    def __init__(self, silence_s: float = PEER_SILENCE_S) -> None:
        """Raises ValueError when `silence_s` isn't positive."""
        if silence_s <= 0:
            raise ValueError(f"a peer's silence is bounded by a positive time, not {silence_s} s")
        self._bound = silence_s
        self._question = silence_s / QUESTIONS
        self._checked: float | None = None
        self._silent = 0.0
        self._unasked = 0.0

    def heard(self) -> None:
        """Something came from the peer, or a piece has ended."""
        self._silent = self._unasked = 0.0

    def check(self, now: float, pending: bool) -> Verdict:
        """What to do at `now`. pending: something is expected from the peer."""
        checked, self._checked = self._checked, now if pending else None
        if checked is None or not pending:
            self.heard()
            return Verdict.WAIT
        passed = min(now - checked, self._question)
        self._silent += passed
        self._unasked += passed
        if self._silent >= self._bound:
            return Verdict.LOST
        if self._unasked < self._question:
            return Verdict.WAIT
        self._unasked = 0.0
        return Verdict.ASK
