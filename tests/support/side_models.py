"""What the two sides add to the scheduler's model: sources and destinations, their phases and leases."""

from scheduler_model import Owned, SchedulerModel

from scheduler.commands import (
    ActivateDestination,
    Applied,
    CancelDestination,
    CancelSource,
    Command,
    CommandResult,
    DestinationAccepted,
    Noop,
    ReleaseSource,
    ReserveDestination,
    SubmitHandoffPrefill,
    Submitted,
)
from scheduler.events import Side
from scheduler.ids import HandoffId, RequestId
from scheduler.request import Request


class SourceModel(SchedulerModel):
    """Phases: pending -> held -> draining. Released while pending, a source goes on as a local request.

    held: what each handoff was held for the last time; it may be over before that is told.
    """

    scheduled = frozenset({"local", "pending"})
    side = Side.SOURCE
    moves_while = "held"

    def __init__(self, total_blocks: int, block_size: int, max_model_len: int, lease_s: float, incarnation: int):
        super().__init__(total_blocks, block_size, max_model_len, lease_s, incarnation)
        self.held: dict[tuple[HandoffId, int], Request] = {}

    def accepts(self, command: Command) -> bool:
        if isinstance(command, SubmitHandoffPrefill):
            return command.handoff_id not in self.by_handoff and self.has_room_for(command.request, 1)
        return isinstance(command, ReleaseSource | CancelSource) or super().accepts(command)

    def target(self, command: Command) -> RequestId | None:
        if isinstance(command, CancelSource):
            owned = self.find(command.handoff_id, command.attempt)
            return owned.name if owned is not None else None
        return super().target(command)

    def perform(self, command: Command) -> CommandResult:
        if isinstance(command, SubmitHandoffPrefill):
            self.own(Owned(command.request, 1, self.now, self.now, command.handoff_id, command.attempt, "pending"))
            return Submitted(command.request.request_id)
        if not isinstance(command, ReleaseSource | CancelSource):
            return super().perform(command)
        owned = self.find(command.handoff_id, command.attempt)
        if owned is None or owned.phase == "draining":
            return Noop()
        if owned.phase == "held":
            self.end_parked(owned)
        elif isinstance(command, CancelSource):
            self.cancel_scheduled(owned)
        else:
            self.leave_handoff(owned)
            owned.phase = "local"
        return Applied()

    def limit_reached(self, owned: Owned) -> None:
        if owned.handoff is None:  # released before it was held
            self.retire(owned, self.kept)
            return
        self.enter(owned, "held")
        self.start_lease(owned)
        self.held[owned.handoff, owned.attempt] = owned.request
        prompt_tokens = len(owned.request.prompt)
        self.kept.events.append(("held", owned.handoff, owned.attempt, owned.name, prompt_tokens))

    def parked_blocks(self, owned: Owned) -> int:
        return self.blocks_for(len(owned.request.prompt))


class DestinationModel(SchedulerModel):
    """Phases: pending -> reserved -> landed -> active, or draining from reserved.

    unacknowledged: armed handoffs that activated themselves and whose ActivateDestination has not come.
    """

    scheduled = frozenset({"local", "active"})
    side = Side.DESTINATION
    moves_while = "reserved"

    def __init__(
        self,
        total_blocks: int,
        block_size: int,
        max_model_len: int,
        lease_s: float,
        incarnation: int,
        max_reservations: int,
    ) -> None:
        super().__init__(total_blocks, block_size, max_model_len, lease_s, incarnation)
        self.max_reservations = max_reservations
        self.unacknowledged: set[tuple[HandoffId, int]] = set()

    def accepts(self, command: Command) -> bool:
        if isinstance(command, ReserveDestination):
            request = command.request
            return command.handoff_id not in self.by_handoff and self.has_room_for(request, request.max_tokens)
        return isinstance(command, ActivateDestination | CancelDestination) or super().accepts(command)

    def target(self, command: Command) -> RequestId | None:
        if isinstance(command, CancelDestination):
            owned = self.find(command.handoff_id, command.attempt)
            return owned.name if owned is not None else None
        return super().target(command)

    def perform(self, command: Command) -> CommandResult:
        match command:
            case ReserveDestination(handoff, request, attempt, armed):
                self.unacknowledged.discard((handoff, attempt))
                limit = request.max_tokens
                self.own(Owned(request, limit, self.now, self.now, handoff, attempt, "pending", armed=armed))
                return DestinationAccepted(request.request_id)
            case ActivateDestination(handoff, attempt):
                if (handoff, attempt) in self.unacknowledged:
                    self.unacknowledged.remove((handoff, attempt))
                    return Applied()
                owned = self.find(handoff, attempt)
                return self.activate(owned) if owned is not None and owned.phase == "landed" else Noop()
            case CancelDestination(handoff, attempt):
                self.unacknowledged.discard((handoff, attempt))
                return self.cancel(self.find(handoff, attempt))
            case _:
                return super().perform(command)

    def parked_blocks(self, owned: Owned) -> int:
        """Room for the prompt and the first token, which only a request of more than one token brings along."""
        return 0 if owned.phase == "pending" else self.blocks_for(len(owned.request.prompt) + (owned.limit > 1))

    def activate(self, owned: Owned) -> CommandResult:
        self.enter(owned, "active")
        assert owned.handoff is not None
        del self.deadlines[owned.handoff]
        return Applied()

    def cancel(self, owned: Owned | None) -> CommandResult:
        if owned is None or owned.phase == "draining":
            return Noop()
        if owned.phase == "active":
            self.cancel_scheduled(owned)
        else:
            self.end_parked(owned)
        return Applied()

    @property
    def waiting(self) -> list[Owned]:
        """Those without blocks, in order of arrival."""
        return [owned for owned in self.by_handoff.values() if owned.phase == "pending"]

    @property
    def in_handoff(self) -> int:
        return sum(owned.phase in ("reserved", "landed", "draining") for owned in self.by_handoff.values())

    def reserved(self, name: RequestId) -> Owned:
        """The scheduler says that it has reserved for `name`; it must be the turn of that one."""
        assert self.step is None, "a reservation in the middle of a step"
        owned = self.waiting[0]
        assert owned.name == name, f"{name} is reserved before {owned.name}"
        assert self.in_handoff < self.max_reservations
        self.enter(owned, "reserved")
        self.start_lease(owned)
        return owned

    def landed(self, handoff: HandoffId, attempt: int) -> bool:
        owned = self.find(handoff, attempt)
        if owned is None or owned.phase != "reserved":
            self.transfer_quiet(handoff, attempt)
            return False
        owned.moving = False
        if owned.limit < 2:
            return False
        self.enter(owned, "landed")
        self.start_lease(owned)
        owned.outputs = 1
        if owned.armed:
            self.activate(owned)
            self.unacknowledged.add((handoff, attempt))
        return True
