"""The destination side: reserve blocks, receive KV, run from the second token on.

    ReserveDestination -> PENDING --blocks--> RESERVED --bytes landed--> LANDED --Activate--> ACTIVE --> retired
                             |                   |                         |                    |
                             `--Cancel--> gone   `--Cancel, bytes may come--> DRAINING          `--Cancel--> retired
                                                                               `--quiet--> retired

An armed reservation goes from RESERVED to ACTIVE by itself when the bytes land. A reservation takes blocks for the
prompt and one token. A pending one waits in FIFO order, and while any waits no sequence that needs fresh blocks is
admitted.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass
from enum import Enum

from scheduler.base import SchedulerBase
from scheduler.batching import BatchLimits
from scheduler.commands import (
    ActivateDestination,
    Applied,
    CancelDestination,
    Command,
    CommandResult,
    DestinationAccepted,
    DestinationFinished,
    DestinationReserved,
    Noop,
    ReserveDestination,
)
from scheduler.errors import CommandRejected
from scheduler.ids import BlockId, HandoffId, RequestId
from scheduler.request import FinishReason
from scheduler.sequence import Sequence

MAX_UNACKNOWLEDGED = 4096
"""Activations that happened by themselves and whose command has not come; a lost coordinator never sends it."""


class DestinationPhase(Enum):
    PENDING = "pending"
    RESERVED = "reserved"
    LANDED = "landed"
    ACTIVE = "active"
    DRAINING = "draining"


@dataclass(slots=True, eq=False)
class Destination:
    handoff_id: HandoffId
    attempt: int
    sequence: Sequence
    phase: DestinationPhase = DestinationPhase.PENDING
    receiving: bool = False
    armed: bool = False


@dataclass(frozen=True, slots=True)
class ReservedKv:
    """What a transfer needs of a reservation. blocks: those of the prompt; the first `cached_blocks` need no bytes."""

    request_id: RequestId
    prompt_tokens: int
    blocks: tuple[BlockId, ...]
    cached_blocks: int


class DecodeScheduler(SchedulerBase):
    """A decode node's scheduler. max_reservations limits handoffs in flight, apart from the batch size."""

    def __init__(
        self,
        total_blocks: int,
        block_size: int,
        limits: BatchLimits,
        *,
        max_model_len: int,
        max_reservations: int = 32,
        prefix_caching: bool = True,
    ) -> None:
        super().__init__(total_blocks, block_size, limits, max_model_len=max_model_len, prefix_caching=prefix_caching)
        self.max_reservations = max_reservations
        self._destinations: dict[HandoffId, Destination] = {}
        self._destination_of: dict[RequestId, Destination] = {}
        self._pending: deque[Destination] = deque()
        self._unacknowledged: OrderedDict[tuple[HandoffId, int], None] = OrderedDict()

    def _perform(self, command: Command) -> CommandResult:
        match command:
            case ReserveDestination(handoff_id, request, attempt, armed):
                if handoff_id in self._destinations:
                    raise CommandRejected(f"handoff {handoff_id} is already a destination on this node")
                sequence = self._new_sequence(request, request.max_tokens)
                destination = Destination(handoff_id, attempt, sequence, armed=armed)
                self._unacknowledged.pop((handoff_id, attempt), None)
                self._sequences[request.request_id] = sequence
                self._destinations[handoff_id] = self._destination_of[request.request_id] = destination
                self._pending.append(destination)
                self._reserve_pending()
                return DestinationAccepted(request.request_id)
            case ActivateDestination(handoff_id, attempt):
                if (handoff_id, attempt) in self._unacknowledged:
                    del self._unacknowledged[handoff_id, attempt]
                    return Applied()
                return self._activate(self._find(handoff_id, attempt))
            case CancelDestination(handoff_id, attempt):
                self._unacknowledged.pop((handoff_id, attempt), None)
                return self._cancel(self._find(handoff_id, attempt))
            case _:
                return super()._perform(command)

    def reserved(self, handoff_id: HandoffId, attempt: int) -> ReservedKv | None:
        """The blocks to receive into, or None if this handoff reserves nothing here."""
        destination = self._find(handoff_id, attempt)
        if destination is None or destination.phase is not DestinationPhase.RESERVED:
            return None
        sequence = destination.sequence
        return ReservedKv(
            request_id=sequence.request.request_id,
            prompt_tokens=sequence.prompt_tokens,
            blocks=tuple(sequence.blocks[: self.kv.blocks_for(sequence.prompt_tokens)]),
            cached_blocks=sequence.published,
        )

    def transfer_started(self, handoff_id: HandoffId, attempt: int) -> None:
        """From now on the transport may write the reserved blocks, until `landed` or `transfer_quiet`."""
        destination = self._find(handoff_id, attempt)
        if destination is not None:
            destination.receiving = True

    def landed(self, handoff_id: HandoffId, attempt: int, first_token: int) -> bool:
        """All bytes are in place and verified. False if the reservation is no longer wanted."""
        destination = self._find(handoff_id, attempt)
        if destination is None or destination.phase is not DestinationPhase.RESERVED:
            self.transfer_quiet(handoff_id, attempt)
            return False
        destination.receiving = False
        destination.phase = DestinationPhase.LANDED
        destination.sequence.tokens.append(first_token)
        if destination.armed:
            self._activate(destination)
            self._remember_activation(handoff_id, attempt)
        return True

    def _remember_activation(self, handoff_id: HandoffId, attempt: int) -> None:
        """The request may end before the coordinator's command comes, and the command must still find it applied."""
        self._unacknowledged[handoff_id, attempt] = None
        if len(self._unacknowledged) > MAX_UNACKNOWLEDGED:
            self._unacknowledged.popitem(last=False)

    def transfer_quiet(self, handoff_id: HandoffId, attempt: int) -> None:
        """Nothing writes these blocks any more, and they didn't all land."""
        destination = self._find(handoff_id, attempt)
        if destination is None:
            return
        destination.receiving = False
        if destination.phase is DestinationPhase.DRAINING:
            self._drop(destination)
            self._at_boundary()

    def _find(self, handoff_id: HandoffId, attempt: int) -> Destination | None:
        destination = self._destinations.get(handoff_id)
        return destination if destination is not None and destination.attempt == attempt else None

    def _activate(self, destination: Destination | None) -> CommandResult:
        if destination is None or destination.phase is not DestinationPhase.LANDED:
            return Noop()
        sequence = destination.sequence
        destination.phase = DestinationPhase.ACTIVE
        self.prompt_tokens_total += sequence.prompt_tokens
        self.cached_tokens_total += sequence.cached
        sequence.computed = sequence.prompt_tokens
        self.kv.publish(sequence)
        self.batcher.submit(sequence)
        self._at_boundary()
        return Applied()

    def _cancel(self, destination: Destination | None) -> CommandResult:
        if destination is None or destination.phase is DestinationPhase.DRAINING:
            return Noop()
        match destination.phase:
            case DestinationPhase.PENDING:
                self._pending.remove(destination)
                self._drop(destination)
            case DestinationPhase.ACTIVE:
                self.batcher.remove(destination.sequence)
                self._drop(destination)
            case _ if destination.receiving:
                destination.phase = DestinationPhase.DRAINING
            case _:
                self._drop(destination)
        self._at_boundary()
        return Applied()

    def _drop(self, destination: Destination) -> None:
        self._forget(destination.sequence)
        self._retire(destination.sequence)

    def _forget(self, sequence: Sequence) -> None:
        destination = self._destination_of.pop(sequence.request.request_id, None)
        if destination is not None:
            del self._destinations[destination.handoff_id]

    def _ended(self, sequence: Sequence, finish: FinishReason | None) -> None:
        destination = self._destination_of.get(sequence.request.request_id)
        if destination is not None and finish is not None:
            self._events.append(
                DestinationFinished(destination.handoff_id, destination.attempt, sequence.request.request_id, finish)
            )
        self._forget(sequence)
        self._retire(sequence)

    def _at_boundary(self) -> None:
        self._reserve_pending()

    def _reserve_pending(self) -> None:
        """Reserve for the pending ones from the head, as far as blocks and the handoff limit go."""
        while self._pending and self._in_handoff() < self.max_reservations:
            destination = self._pending[0]
            sequence = destination.sequence
            if not self.kv.admit(sequence, self._positions(sequence), leave=0):
                return
            self._pending.popleft()
            destination.phase = DestinationPhase.RESERVED
            prompt_blocks = self.kv.blocks_for(sequence.prompt_tokens)
            self._events.append(
                DestinationReserved(
                    handoff_id=destination.handoff_id,
                    attempt=destination.attempt,
                    request_id=sequence.request.request_id,
                    prompt_blocks=prompt_blocks,
                    missing_blocks=prompt_blocks - sequence.published,
                )
            )

    @staticmethod
    def _positions(sequence: Sequence) -> int:
        """What a reservation covers; a request of one token never runs here and needs no room after its prompt."""
        return sequence.prompt_tokens + min(1, sequence.output_limit - 1)

    def _in_handoff(self) -> int:
        """Reservations that are not runnable yet, draining ones included."""
        waiting = (DestinationPhase.PENDING, DestinationPhase.ACTIVE)
        return sum(1 for d in self._destinations.values() if d.phase not in waiting)

    def _may_admit_fresh(self) -> bool:
        return not self._pending

    def _parked_blocks(self) -> tuple[int, int, int]:
        def blocks(*phases: DestinationPhase) -> int:
            return sum(len(d.sequence.blocks) for d in self._destinations.values() if d.phase in phases)

        reserved = blocks(DestinationPhase.RESERVED, DestinationPhase.LANDED)
        return 0, reserved, blocks(DestinationPhase.DRAINING)

    def _waiting_elsewhere(self) -> int:
        return len(self._pending)
