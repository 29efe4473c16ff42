"""A scheduler as seen from outside, in dictionaries and lists: who is owned, in which phase, and what is told when.

The model of the property tests. It chooses nothing: which requests a step runs and when a reservation gets its blocks
it learns from the real one. All that follows from these choices it predicts. It shares no code with the schedulers.
"""

from dataclasses import dataclass, field
from typing import TypeAlias

from truth import right_answer

from scheduler.commands import Applied, CancelRequest, Command, CommandResult, Noop, Submit, Submitted
from scheduler.commands import ReserveDestination as Reserve
from scheduler.commands import SubmitHandoffPrefill as Prefill
from scheduler.errors import CommandRejected, SchedulerError, StaleIncarnation, StepInFlight
from scheduler.events import (
    DestinationFinished,
    DestinationReserved,
    LeaseExpired,
    LifecycleEvent,
    Output,
    Side,
    SourceFinished,
    SourceHeld,
)
from scheduler.ids import HandoffId, RequestId
from scheduler.request import FinishReason, Request

Told: TypeAlias = tuple[object, ...]
"""An event without what the model can't know: its kind, handoff, attempt, request and reason."""


def told(event: LifecycleEvent) -> Told:
    start = event.handoff_id, event.attempt, event.request_id
    match event:
        case SourceHeld():
            return ("held", *start, event.prompt_tokens)
        case SourceFinished(finish=finish) | DestinationFinished(finish=finish):
            return ("finished", *start, finish)
        case LeaseExpired(side=side):
            return ("expired", *start, side)
        case DestinationReserved():
            return ("reserved", *start)


@dataclass(slots=True, eq=False)
class Owned:
    """One request. limit: tokens that this node may sample. outputs: tokens that exist of it.

    phase: "local" without a handoff, else the inventory's word. moving: the transport may touch its blocks.
    since: when its command came. entered: when its phase began. submitted: it came by Submit. has_run: a step computed
    something of it.
    """

    request: Request
    limit: int
    since: float
    entered: float
    handoff: HandoffId | None = None
    attempt: int = 0
    phase: str = "local"
    outputs: int = 0
    moving: bool = False
    armed: bool = False
    submitted: bool = False
    has_run: bool = False

    @property
    def name(self) -> RequestId:
        return self.request.request_id

    @property
    def known(self) -> list[int]:
        return [*self.request.prompt, *right_answer(self.request).tokens[: self.outputs]]


@dataclass(slots=True, eq=False)
class Running:
    """A row of the step that runs. doomed: its request was cancelled meanwhile."""

    owned: Owned
    draws: bool
    doomed: bool = False


@dataclass(frozen=True, slots=True)
class Expected:
    """What a command must do: raise `error` and nothing else, or have this result."""

    error: type[SchedulerError] | None = None
    result: CommandResult | None = None
    suppressed: bool = False


@dataclass(slots=True)
class Telling:
    """What becomes visible together."""

    outputs: list[Output] = field(default_factory=list)
    events: list[Told] = field(default_factory=list)
    retired: list[RequestId] = field(default_factory=list)


class SchedulerModel:
    """owned: requests by id. by_handoff: those of handoffs. step: rows of the step that runs, None between steps.

    kept: what the last step and the transfers brought, told at the next boundary. due: what a command causes, told with
    its result.
    asked: effects wait for the device's answer. deadlines: ends of leases.
    """

    scheduled = frozenset({"local"})
    side: Side
    moves_while: str
    """The phase in which a transfer may start."""

    def __init__(
        self, total_blocks: int, block_size: int, max_model_len: int, lease_s: float, incarnation: int
    ) -> None:
        self.total_blocks = total_blocks
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.lease_s = lease_s
        self.incarnation = incarnation
        self.now = 0.0
        self.owned: dict[RequestId, Owned] = {}
        self.by_handoff: dict[HandoffId, Owned] = {}
        self.deadlines: dict[HandoffId, float] = {}
        self.step: list[Running] | None = None
        self.asked = False
        self.kept = Telling()
        self.due = Telling()
        self.suppressions = self.expiries = 0

    # Transfers

    def transfer_started(self, handoff: HandoffId, attempt: int) -> None:
        owned = self.find(handoff, attempt)
        if owned is not None and owned.phase == self.moves_while:
            owned.moving = True
            self.start_lease(owned)

    def transfer_quiet(self, handoff: HandoffId, attempt: int) -> None:
        owned = self.find(handoff, attempt)
        if owned is not None:
            owned.moving = False
            if owned.phase == "draining":
                self.retire(owned, self.kept)

    # Commands

    def apply(self, command: Command, incarnation: int | None) -> Expected:
        if incarnation not in (None, self.incarnation):
            return Expected(StaleIncarnation)
        if self.step is not None and not isinstance(command, Submit | Prefill | Reserve | CancelRequest):
            return Expected(StepInFlight)
        if self.asked:
            return Expected(StepInFlight)
        if not self.accepts(command):
            return Expected(CommandRejected)
        target = self.target(command)
        result = self.perform(command)
        suppressed = False
        if isinstance(result, Applied) or (isinstance(command, CancelRequest) and command.discard_pending_output):
            suppressed = target is not None and self.suppress(target)
        return Expected(None, Applied() if suppressed else result, suppressed)

    def accepts(self, command: Command) -> bool:
        """Whether this side knows the command and its ids and sizes are acceptable."""
        if isinstance(command, Submit):
            return self.has_room_for(command.request, command.request.max_tokens)
        return isinstance(command, CancelRequest)

    def has_room_for(self, request: Request, limit: int) -> bool:
        length = len(request.prompt) + limit
        return (
            request.request_id not in self.owned
            and request.request_id not in self.kept.retired
            and request.request_id not in [output.request_id for output in self.kept.outputs]
            and length <= self.max_model_len + 1
            and self.blocks_for(length - 1) <= self.total_blocks
        )

    def blocks_for(self, tokens: int) -> int:
        return (tokens + self.block_size - 1) // self.block_size

    def target(self, command: Command) -> RequestId | None:
        """Whose kept outputs a cancelling command takes back."""
        return command.request_id if isinstance(command, CancelRequest) else None

    def perform(self, command: Command) -> CommandResult:
        if isinstance(command, Submit):
            self.own(Owned(command.request, command.request.max_tokens, self.now, self.now, submitted=True))
            return Submitted(command.request.request_id)
        assert isinstance(command, CancelRequest)
        owned = self.owned.get(command.request_id)
        if owned is None or owned.phase not in self.scheduled:
            return Noop()
        self.cancel_scheduled(owned)
        return Applied()

    def own(self, owned: Owned) -> None:
        self.owned[owned.name] = owned
        if owned.handoff is not None:
            self.by_handoff[owned.handoff] = owned

    def parked_blocks(self, owned: Owned) -> int:
        """Of one that doesn't run."""
        raise NotImplementedError

    def cancel_scheduled(self, owned: Owned) -> None:
        for row in self.step or ():
            if row.owned is owned:
                row.doomed = True
        self.retire(owned, self.due)

    def suppress(self, name: RequestId) -> bool:
        kept = self.kept
        outputs = [output for output in kept.outputs if output.request_id != name]
        events = [event for event in kept.events if event[3] != name]
        dropped = len(outputs) < len(kept.outputs) or len(events) < len(kept.events)
        kept.outputs, kept.events = outputs, events
        if dropped:
            self.suppressions += 1
            if name in kept.retired:
                kept.retired.remove(name)
                self.due.retired.append(name)
        return dropped

    def retire(self, owned: Owned, telling: Telling) -> None:
        """It is over for this node, which is told exactly once."""
        telling.retired.append(owned.name)
        del self.owned[owned.name]
        self.leave_handoff(owned)

    def leave_handoff(self, owned: Owned) -> None:
        if owned.handoff is not None:
            del self.by_handoff[owned.handoff]
            self.deadlines.pop(owned.handoff, None)
            owned.handoff = None

    def find(self, handoff: HandoffId, attempt: int) -> Owned | None:
        owned = self.by_handoff.get(handoff)
        return owned if owned is not None and owned.attempt == attempt else None

    # Leases

    def enter(self, owned: Owned, phase: str) -> None:
        owned.phase, owned.entered = phase, self.now

    def start_lease(self, owned: Owned) -> None:
        assert owned.handoff is not None
        self.deadlines[owned.handoff] = self.now + self.lease_s

    def renew(self, handoff: HandoffId, attempt: int) -> bool:
        owned = self.find(handoff, attempt)
        if owned is None or handoff not in self.deadlines:
            return False
        self.start_lease(owned)
        return True

    def end_parked(self, owned: Owned) -> None:
        """What holds KV and doesn't run is over; its blocks stay until the transport is quiet."""
        if not owned.moving:
            self.retire(owned, self.due)
            return
        self.enter(owned, "draining")
        assert owned.handoff is not None
        self.deadlines.pop(owned.handoff, None)

    # Steps and boundaries

    def launch(self, rows: list[Running]) -> None:
        assert self.step is None
        self.step = rows
        for row in rows:
            row.owned.has_run = True

    def settle(self, failed: bool) -> None:
        assert self.step is not None
        rows, self.step = self.step, None
        for row in rows:
            if row.doomed:
                continue
            if failed:
                self.finish_with(row.owned, None, FinishReason.ERROR)
            elif row.draws:
                self.sampled(row.owned)

    def sampled(self, owned: Owned) -> None:
        answer = right_answer(owned.request)
        index = owned.outputs
        owned.outputs += 1
        finish = answer.finish_at(index)
        if finish is not None:
            self.finish_with(owned, answer.tokens[index], finish)
            return
        self.kept.outputs.append(Output(owned.name, index, answer.tokens[index]))
        if owned.outputs >= owned.limit:
            self.limit_reached(owned)

    def finish_with(self, owned: Owned, token: int | None, finish: FinishReason) -> None:
        index = owned.outputs - (token is not None)
        self.kept.outputs.append(Output(owned.name, index, token, finish))
        if owned.handoff is not None:
            self.kept.events.append(("finished", owned.handoff, owned.attempt, owned.name, finish))
        self.retire(owned, self.kept)

    def limit_reached(self, owned: Owned) -> None:
        """All that this node may sample is sampled, and the request goes on elsewhere."""
        raise NotImplementedError

    def boundary(self, now: float) -> Telling:
        self.now = max(self.now, now)
        for handoff in sorted(self.deadlines, key=lambda h: self.deadlines[h]):
            owned = self.by_handoff[handoff]
            if self.deadlines[handoff] <= self.now:
                self.expiries += 1
                self.due.events.append(("expired", handoff, owned.attempt, owned.name, self.side))
                self.end_parked(owned)
                self.deadlines.pop(handoff, None)
        kept, self.kept = self.kept, Telling()
        due = self.tell()
        return Telling(kept.outputs, kept.events + due.events, kept.retired + due.retired)

    def tell(self) -> Telling:
        due, self.due = self.due, Telling()
        return due
