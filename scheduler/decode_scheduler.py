"""The destination side: reserve blocks, receive KV, run from the second token on.

    ReserveDestination -> PENDING --blocks--> RESERVED --bytes landed--> LANDED --Activate--> ACTIVE --> retired
                             |                   |                         |                    |
                             `--Cancel--> gone   `--Cancel, lease: bytes may come--> DRAINING   `--Cancel--> retired
                                                                               `--quiet--> retired

An armed reservation goes from RESERVED to ACTIVE by itself when the bytes land. A reservation takes blocks for the
prompt and one token. Pending ones wait in FIFO order for blocks and for a place among `max_reservations`; each occasion
reserves the head at most. While any waits no new sequence that needs blocks is admitted; a preempted one is, and goes
before them, or a steady stream of handoffs would starve it.
"""

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from typing import Unpack

from scheduler.base import SchedulerBase
from scheduler.batching import BatchLimits
from scheduler.commands import (
    ActivateDestination,
    Applied,
    CancelDestination,
    Command,
    CommandResult,
    DestinationAccepted,
    Noop,
    ReserveDestination,
)
from scheduler.effects import NO_SLOT
from scheduler.errors import CommandRejected
from scheduler.events import DestinationFinished, DestinationReserved, LeaseExpired, Side
from scheduler.ids import BlockId, HandoffId, NodeId, RequestId
from scheduler.inventory import Holding, holding
from scheduler.options import SchedulerOptions
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

    __hash__ = object.__hash__  # by identity, as enums compare; the name's hash is a call in Python


_IN_HANDOFF = frozenset({DestinationPhase.RESERVED, DestinationPhase.LANDED, DestinationPhase.DRAINING})


@dataclass(slots=True, eq=False)
class Destination:
    """since: seconds when it entered its phase. receiving: the transport may write its blocks. source: as commanded."""

    handoff_id: HandoffId
    attempt: int
    sequence: Sequence
    since: float
    phase: DestinationPhase = DestinationPhase.PENDING
    receiving: bool = False
    armed: bool = False
    source: NodeId | None = None


@dataclass(frozen=True, slots=True)
class ReservedKv:
    """What a transfer needs of a reservation. blocks: those of the prompt; the first `cached_blocks` need no bytes.

    source: who alone may fill them; None for any.
    """

    request_id: RequestId
    prompt_tokens: int
    blocks: tuple[BlockId, ...]
    cached_blocks: int
    slot: int = NO_SLOT
    adapter: str | None = None
    source: NodeId | None = None


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
        **options: Unpack[SchedulerOptions],
    ) -> None:
        super().__init__(total_blocks, block_size, limits, max_model_len=max_model_len, **options)
        if max_reservations < 1:
            raise ValueError(f"max_reservations is {max_reservations}, must be at least 1")
        self.max_reservations = max_reservations
        self._destinations: dict[HandoffId, Destination] = {}
        self._destination_of: dict[RequestId, Destination] = {}
        self._pending: OrderedDict[HandoffId, Destination] = OrderedDict()
        self._in_handoff = 0
        self._unacknowledged: OrderedDict[tuple[HandoffId, int], None] = OrderedDict()

    def _perform(self, command: Command) -> CommandResult:
        match command:
            case ReserveDestination():
                return self._accept(command)
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

    def _accept(self, command: ReserveDestination) -> CommandResult:
        handoff_id, attempt, request = command.handoff_id, command.attempt, command.request
        if handoff_id in self._destinations:
            raise CommandRejected(f"handoff {handoff_id} is already a destination on this node")
        sequence = self._new_sequence(request, request.max_tokens)
        self._own(sequence, f"accepted as the destination of handoff {handoff_id}, attempt {attempt}")
        destination = Destination(handoff_id, attempt, sequence, self.now, source=command.source)
        destination.armed = command.activate_when_landed
        self._unacknowledged.pop((handoff_id, attempt), None)
        self._destinations[handoff_id] = self._destination_of[request.request_id] = destination
        self._pending[handoff_id] = destination
        self._retry_pending()
        return DestinationAccepted(request.request_id)

    def reserved(self, handoff_id: HandoffId, attempt: int) -> ReservedKv | None:
        """The blocks to receive into, or None if this handoff reserves nothing here."""
        destination = self._find(handoff_id, attempt)
        if destination is None or destination.phase is not DestinationPhase.RESERVED:
            return None
        sequence = destination.sequence
        return ReservedKv(
            request_id=sequence.request_id,
            prompt_tokens=sequence.prompt_tokens,
            blocks=tuple(sequence.blocks[: self.kv.blocks_for(sequence.prompt_tokens)]),
            cached_blocks=sequence.published,
            slot=sequence.slot,
            adapter=sequence.adapter,
            source=destination.source,
        )

    def transfer_started(self, handoff_id: HandoffId, attempt: int) -> None:
        """From now on the transport may write the reserved blocks, until `landed` or `transfer_quiet`."""
        destination = self._find(handoff_id, attempt)
        if destination is not None and destination.phase is DestinationPhase.RESERVED:
            destination.receiving = True
            self._leases.renew(handoff_id, self.now)
            self._note(destination.sequence, "transfer started")

    def landed(self, handoff_id: HandoffId, attempt: int, first_token: int) -> bool:
        """All bytes are in place and verified. False if the reservation is no longer wanted.

        A request of one token ends at its source, so nothing that lands for it is wanted.
        """
        destination = self._find(handoff_id, attempt)
        if destination is None or destination.phase is not DestinationPhase.RESERVED:
            self.transfer_quiet(handoff_id, attempt)
            return False
        destination.receiving = False
        if destination.sequence.output_limit < 2:
            return False
        self._enter(destination, DestinationPhase.LANDED)
        self._leases.renew(handoff_id, self.now)
        destination.sequence.known.append(first_token)
        self._note(destination.sequence, "landed")
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
        self._note(destination.sequence, "transfer quiet")
        if destination.phase is DestinationPhase.DRAINING:
            self._drop(destination)
            self._keep_back_events()

    def _find(self, handoff_id: HandoffId, attempt: int) -> Destination | None:
        destination = self._destinations.get(handoff_id)
        return destination if destination is not None and destination.attempt == attempt else None

    def _enter(self, destination: Destination, phase: DestinationPhase) -> None:
        self._in_handoff += (phase in _IN_HANDOFF) - (destination.phase in _IN_HANDOFF)
        destination.phase, destination.since = phase, self.now

    def _activate(self, destination: Destination | None) -> CommandResult:
        if destination is None or destination.phase is not DestinationPhase.LANDED:
            return Noop()
        sequence = destination.sequence
        self._enter(destination, DestinationPhase.ACTIVE)
        self._leases.end(destination.handoff_id)
        self._note(sequence, "activated")
        self.counters.prompt_tokens += sequence.prompt_tokens
        self.counters.cached_tokens += sequence.cached
        sequence.start = sequence.prompt_tokens
        self.kv.publish(sequence)
        self.batcher.enqueue_ready(sequence)
        return Applied()

    def _cancel(self, destination: Destination | None) -> CommandResult:
        if destination is None or destination.phase is DestinationPhase.DRAINING:
            return Noop()
        if destination.phase is DestinationPhase.ACTIVE:
            self._cancel_scheduled(destination.sequence)
        else:
            self._note(destination.sequence, f"cancelled while {destination.phase.value}")
            self._end_parked(destination)
        return Applied()

    def _end_parked(self, destination: Destination) -> None:
        """A destination that doesn't run is over; its blocks wait until nothing writes them."""
        if destination.receiving:
            self._enter(destination, DestinationPhase.DRAINING)
            self._leases.end(destination.handoff_id)
            self._note(destination.sequence, "draining until the transport is quiet")
        else:
            self._drop(destination)

    def _drop(self, destination: Destination) -> None:
        """What came of the KV is not trusted as prefix cache."""
        self._forget(destination.sequence)
        self._retire(destination.sequence, keep=False)

    def _forget(self, sequence: Sequence) -> None:
        destination = self._destination_of.pop(sequence.request_id, None)
        if destination is not None:
            self._in_handoff -= destination.phase in _IN_HANDOFF
            del self._destinations[destination.handoff_id]
            self._pending.pop(destination.handoff_id, None)
            self._leases.end(destination.handoff_id)

    def _ended(self, sequence: Sequence, finish: FinishReason | None, *, keep: bool) -> None:
        destination = self._destination_of.get(sequence.request_id)
        if destination is not None and finish is not None:
            self._events.append(
                DestinationFinished(destination.handoff_id, destination.attempt, sequence.request_id, finish)
            )
        self._forget(sequence)
        self._retire(sequence, keep=keep)

    def _expire(self, handoff_id: HandoffId) -> None:
        destination = self._destinations[handoff_id]
        sequence = destination.sequence
        self._note(sequence, f"lease of {self._leases.duration_s:g} s expired while {destination.phase.value}")
        self._events.append(LeaseExpired(handoff_id, destination.attempt, sequence.request_id, Side.DESTINATION))
        self._end_parked(destination)

    def _retry_pending(self) -> None:
        """Reserve for the head of the pending ones, if anything has changed since it was tried last."""
        if not self._pending or self._in_handoff >= self.max_reservations or self._is_mid_step:
            return
        if self.batcher.pressure.is_blocked or self.is_admission_held:
            return
        destination = next(iter(self._pending.values()))
        sequence = destination.sequence
        probe = (self.kv.pool.generation, 0)
        if sequence.probed == probe:
            return
        if not self.kv.admit(sequence, self._positions(sequence), leave=0):
            sequence.probed = probe
            return
        del self._pending[destination.handoff_id]
        self._enter(destination, DestinationPhase.RESERVED)
        self._leases.renew(destination.handoff_id, self.now)
        sequence.cached = sequence.start
        prompt_blocks = self.kv.blocks_for(sequence.prompt_tokens)
        missing = prompt_blocks - sequence.published
        self._note(sequence, f"reserved, {missing} of {prompt_blocks} blocks missing")
        self._events.append(
            DestinationReserved(
                handoff_id=destination.handoff_id,
                attempt=destination.attempt,
                request_id=sequence.request_id,
                prompt_blocks=prompt_blocks,
                missing_blocks=missing,
            )
        )

    @staticmethod
    def _positions(sequence: Sequence) -> int:
        """What a reservation covers; a request of one token never runs here and needs no room after its prompt."""
        return sequence.prompt_tokens + min(1, sequence.output_limit - 1)

    def _may_admit_fresh(self) -> bool:
        return not self._pending

    def _request_of(self, handoff_id: HandoffId, attempt: int) -> RequestId | None:
        destination = self._find(handoff_id, attempt)
        return None if destination is None else destination.sequence.request_id

    def _parked(self) -> dict[str, list[Sequence]]:
        names = {
            DestinationPhase.PENDING: "pending",
            DestinationPhase.RESERVED: "reserved",
            DestinationPhase.LANDED: "reserved",
            DestinationPhase.DRAINING: "draining",
        }
        parked: dict[str, list[Sequence]] = {name: [] for name in names.values()}
        for destination in self._destinations.values():
            if destination.phase in names:
                parked[names[destination.phase]].append(destination.sequence)
        return parked

    def _holdings(self) -> tuple[Holding, ...]:
        return tuple(holding(Side.DESTINATION, owned, self.now, self._leases) for owned in self._destinations.values())
