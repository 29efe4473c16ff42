"""A request while a scheduler owns it: its tokens, its block table, and how far its KV is computed.

known     [ prompt ............. | sampled ... ]
KV        [ cached | computed .. | pending ]      `start` is the first position without KV
blocks    [ published ... | private tail ]        published counts blocks findable by hash
"""

from enum import Enum

from scheduler.contract import Draw, Row
from scheduler.effects import NO_SLOT
from scheduler.ids import BlockHash, BlockId
from scheduler.request import FinishReason, Request


class SequenceState(Enum):
    """Where a sequence is. Exactly one queue or set holds it in each of them."""

    PARKED = "parked"
    """Its handoff owns it: pending, reserved, landed, held or draining. Never in a batch."""
    WAITING = "waiting"
    """In the queue, without blocks."""
    READY = "ready"
    """Owns its blocks and waits for a place in the batch."""
    RUNNING = "running"
    PREEMPTED = "preempted"
    """Gave up its blocks; its KV is computed again."""
    SPILLED = "spilled"
    """Gave up its blocks; its KV is in the spill store."""
    RESTORING = "restoring"
    """Owns blocks that the spill store fills."""
    DOOMED = "doomed"
    """Cancelled while a step of it runs; the blocks return when that step is settled."""
    ENDED = "ended"

    __hash__ = object.__hash__  # by identity, as enums compare; the name's hash is a call in Python


SCHEDULED = frozenset(SequenceState) - {SequenceState.PARKED, SequenceState.DOOMED, SequenceState.ENDED}
"""States in which the batcher owns a sequence."""


class Sequence(Row):
    """Mutable, owned by one scheduler, compared by identity. It is the device's `Row` at the same time, so that a step
    of many sequences copies nothing.

    arrival: ordinal of its command. since: seconds of the scheduler's clock when it was queued.
    output_limit: how many tokens this node may sample (1 for the source of a handoff).
    committed: blocks that admission has promised it, now and later; 0 where admission promises nothing.
    check_at: the length of `known` at which something other than "one more token" happens: a block is full, the limit
    is reached, stop tokens become legal.
    immune_until: outputs before which it can't be preempted again.
    step: number of the newest launched step that computes something of it.
    probed: the pool's generation and the headroom with which admission last failed.
    """

    __slots__ = (
        "arrival",
        "cached",
        "chain",
        "check_at",
        "committed",
        "immune_until",
        "output_limit",
        "preemptions",
        "probed",
        "published",
        "request",
        "since",
        "state",
        "step",
        "stops",
    )
    known: list[int]
    blocks: list[BlockId]

    def __init__(self, request: Request, arrival: int, output_limit: int, since: float = 0.0) -> None:
        self.request_id = request.request_id
        self.known = list(request.prompt)
        self.start = self.end = 0
        self.blocks = []
        self.draw = None
        self.slot = NO_SLOT
        self.adapter = request.adapter
        self.request = request
        self.prompt_tokens = len(request.prompt)
        self.stops = request.stop_token_ids
        self.arrival = arrival
        self.since = since
        self.output_limit = output_limit
        self.state = SequenceState.PARKED
        self.chain: list[BlockHash] = []
        self.cached = self.published = self.committed = self.preemptions = 0
        self.immune_until = self.check_at = self.step = 0
        self.probed: tuple[int, int] | None = None

    @property
    def outputs(self) -> int:
        """Tokens sampled so far, on any node."""
        return len(self.known) - self.prompt_tokens

    @property
    def pending(self) -> int:
        """Tokens whose KV is not computed yet."""
        return len(self.known) - self.start

    def next_draw(self) -> Draw:
        """How the token after the last known one is drawn."""
        return self._draw_at(self.outputs)

    def draw_after_next(self) -> Draw:
        """How the token after that one is drawn."""
        draw = self.draw
        return draw if draw is not None and not draw.suppress else self._draw_at(self.outputs + 1)

    def _draw_at(self, outputs: int) -> Draw:
        request = self.request
        suppressed = request.stop_token_ids if outputs < request.min_tokens else frozenset[int]()
        return Draw(request.sampling, suppressed)

    def finish_with(self, token: int) -> FinishReason | None:
        """Why the request ends with `token`, its last known one; None if it goes on, here or elsewhere."""
        return self.request.finish_after(self.outputs, token)

    def update_check_at(self, block_size: int) -> None:
        """Set `check_at` for the tokens to come."""
        length = len(self.known)
        if length == self.prompt_tokens:
            self.check_at = 0  # a first token is reported with what was cached of the prompt
            return
        check_at = ((length - 1) // block_size + 1) * block_size + 1
        check_at = min(check_at, self.prompt_tokens + self.output_limit)
        legal = self.prompt_tokens + self.request.min_tokens
        self.check_at = min(check_at, legal) if length < legal else check_at
