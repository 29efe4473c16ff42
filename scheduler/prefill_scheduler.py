"""The source side: prefill, sample the first token, hold the KV until the handoff is over.

SubmitHandoffPrefill -> PENDING --first token--> HELD --Release/Cancel/lease--> retired
                           |          |            `--while sending--> DRAINING --quiet--> retired
                           |          `--request ended by it--> retired (SourceFinished)
                           `--Cancel--> retired

A pending source queues here until fewer than `max_handoffs` are under way, then in the batcher. Only a held one has a
lease: a pending one waits for this node itself.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Unpack

from scheduler.base import SchedulerBase
from scheduler.batching import BatchLimits
from scheduler.commands import (
    Applied,
    CancelSource,
    Command,
    CommandResult,
    Noop,
    ReleaseSource,
    SubmitHandoffPrefill,
    Submitted,
)
from scheduler.effects import NO_SLOT
from scheduler.errors import CommandRejected
from scheduler.events import LeaseExpired, Side, SourceFinished, SourceHeld
from scheduler.ids import BlockId, HandoffId, RequestId
from scheduler.inventory import Holding, holding
from scheduler.options import SchedulerOptions, policy_of
from scheduler.queues import WaitingQueue
from scheduler.request import FinishReason
from scheduler.sequence import Sequence


class SourcePhase(Enum):
    PENDING = "pending"
    HELD = "held"
    DRAINING = "draining"


@dataclass(slots=True, eq=False)
class Source:
    """since: seconds when it entered its phase. sending: the transport may read its blocks."""

    handoff_id: HandoffId
    attempt: int
    sequence: Sequence
    since: float
    phase: SourcePhase = SourcePhase.PENDING
    sending: bool = False


@dataclass(frozen=True, slots=True)
class HeldKv:
    """What a transfer needs of a held source. blocks: those of the prompt, in order. generation: see SourceProgress."""

    request_id: RequestId
    prompt_tokens: int
    first_token: int
    blocks: tuple[BlockId, ...]
    slot: int = NO_SLOT
    adapter: str | None = None
    generation: int = 0


@dataclass(frozen=True, slots=True)
class SourceProgress:
    """How far a source's prefill is. final: how many of the first `blocks` change no more. generation: grows each time
    that it loses its blocks.
    """

    blocks: tuple[BlockId, ...]
    final: int
    generation: int


class PrefillScheduler(SchedulerBase):
    """A prefill node's scheduler. max_handoffs: sources that may prefill or hold KV at a time, apart from the batch."""

    def __init__(
        self,
        total_blocks: int,
        block_size: int,
        limits: BatchLimits,
        *,
        max_model_len: int,
        max_handoffs: int = 256,
        **options: Unpack[SchedulerOptions],
    ) -> None:
        super().__init__(total_blocks, block_size, limits, max_model_len=max_model_len, **options)
        if max_handoffs < 1:
            raise ValueError(f"max_handoffs is {max_handoffs}, must be at least 1")
        self.max_handoffs = max_handoffs
        self._queued = WaitingQueue(policy_of(options).queue_key())
        self._sources: dict[HandoffId, Source] = {}
        self._source_of: dict[RequestId, Source] = {}

    def _perform(self, command: Command) -> CommandResult:
        match command:
            case SubmitHandoffPrefill():
                return self._submit(command)
            case ReleaseSource(handoff_id, attempt):
                return self._end(self._find(handoff_id, attempt), cancel=False)
            case CancelSource(handoff_id, attempt):
                return self._end(self._find(handoff_id, attempt), cancel=True)
            case _:
                return super()._perform(command)

    def _submit(self, command: SubmitHandoffPrefill) -> CommandResult:
        handoff_id, attempt = command.handoff_id, command.attempt
        if handoff_id in self._sources:
            raise CommandRejected(f"handoff {handoff_id} is already a source on this node")
        sequence = self._new_sequence(command.request, output_limit=1)
        self._own(sequence, f"submitted as the source of handoff {handoff_id}, attempt {attempt}")
        source = Source(handoff_id, attempt, sequence, self.now)
        self._sources[handoff_id] = self._source_of[sequence.request_id] = source
        self._queued.push(sequence)
        self._retry_pending()
        return Submitted(sequence.request_id)

    def _retry_pending(self) -> None:
        """Let queued sources into the batcher as far as the limit goes."""
        while len(self._queued) and len(self._sources) - len(self._queued) < self.max_handoffs:
            sequence = self._queued.head()
            assert sequence is not None
            self._queued.remove(sequence)
            self.batcher.enqueue(sequence)

    def held(self, handoff_id: HandoffId, attempt: int) -> HeldKv | None:
        """The KV to send, or None if this handoff holds nothing here."""
        source = self._find(handoff_id, attempt)
        if source is None or source.phase is not SourcePhase.HELD:
            return None
        sequence = source.sequence
        return HeldKv(
            request_id=sequence.request_id,
            prompt_tokens=sequence.prompt_tokens,
            first_token=sequence.known[-1],
            blocks=tuple(sequence.blocks),
            slot=sequence.slot,
            adapter=sequence.adapter,
            generation=sequence.preemptions,
        )

    def progress(
        self, handoff_id: HandoffId, attempt: int, known: SourceProgress | None = None
    ) -> SourceProgress | None:
        """How far the prefill is, or None if that is what is known of it, or it is no prefill."""
        source = self._find(handoff_id, attempt)
        if source is None or source.phase is not SourcePhase.PENDING:
            return None
        sequence = source.sequence
        # One that waits for blocks has none, and nothing of it is final.
        final = min(sequence.start // self.kv.block_size, len(sequence.blocks))
        if known is not None and (known.final, known.generation) == (final, sequence.preemptions):
            return None
        return SourceProgress(tuple(sequence.blocks), final, sequence.preemptions)

    def transfer_started(self, handoff_id: HandoffId, attempt: int) -> None:
        """The transport may read the held blocks until `transfer_quiet`."""
        source = self._find(handoff_id, attempt)
        if source is not None and source.phase is SourcePhase.HELD:
            source.sending = True
            self._note(source.sequence, "transfer started")
            self._leases.renew(handoff_id, self.now)

    def transfer_quiet(self, handoff_id: HandoffId, attempt: int) -> None:
        """The transport is done with the blocks, with or without success."""
        source = self._find(handoff_id, attempt)
        if source is None:
            return
        source.sending = False
        self._note(source.sequence, "transfer quiet")
        if source.phase is SourcePhase.DRAINING:
            self._drop(source)
            self._keep_back_events()

    def _find(self, handoff_id: HandoffId, attempt: int) -> Source | None:
        source = self._sources.get(handoff_id)
        return source if source is not None and source.attempt == attempt else None

    def _end(self, source: Source | None, *, cancel: bool) -> CommandResult:
        if source is None or source.phase is SourcePhase.DRAINING:
            return Noop()
        if source.phase is SourcePhase.PENDING:
            self._end_pending(source, cancel=cancel)
        else:
            self._note(source.sequence, "cancelled while held" if cancel else "released")
            self._end_held(source)
        return Applied()

    def _end_pending(self, source: Source, *, cancel: bool) -> None:
        sequence = source.sequence
        if sequence in self._queued:
            self._queued.remove(sequence)
            self.batcher.enqueue(sequence)
        if cancel:
            self._cancel_scheduled(sequence)
            return
        # Released before it was held: the prefill goes on as any request and frees its KV when it ends.
        self._note(sequence, "released before it was held")
        self._forget(sequence)

    def _end_held(self, source: Source) -> None:
        if source.sending:
            source.phase, source.since = SourcePhase.DRAINING, self.now
            self._leases.end(source.handoff_id)
            self._note(source.sequence, "draining until the transport is quiet")
        else:
            self._drop(source)

    def _drop(self, source: Source) -> None:
        self._forget(source.sequence)
        self._retire(source.sequence)

    def _forget(self, sequence: Sequence) -> None:
        source = self._source_of.pop(sequence.request_id, None)
        if source is not None:
            del self._sources[source.handoff_id]
            self._leases.end(source.handoff_id)

    def _cancel_request(self, request_id: RequestId) -> CommandResult:
        source = self._source_of.get(request_id)
        if source is not None and source.phase is SourcePhase.PENDING:
            self._end_pending(source, cancel=True)
            return Applied()
        return super()._cancel_request(request_id)

    def _ended(self, sequence: Sequence, finish: FinishReason | None, *, keep: bool) -> None:
        source = self._source_of.get(sequence.request_id)
        if source is None:
            self._retire(sequence, keep=keep)
        elif finish is not None:
            self._events.append(SourceFinished(source.handoff_id, source.attempt, sequence.request_id, finish))
            self._forget(sequence)
            self._retire(sequence, keep=keep)
        else:
            self._hold(source)

    def _hold(self, source: Source) -> None:
        sequence = source.sequence
        source.phase, source.since = SourcePhase.HELD, self.now
        self._leases.renew(source.handoff_id, self.now)
        self._note(sequence, "held")
        self._events.append(
            SourceHeld(
                handoff_id=source.handoff_id,
                attempt=source.attempt,
                request_id=sequence.request_id,
                prompt_tokens=sequence.prompt_tokens,
                cached_tokens=sequence.cached,
            )
        )

    def _expire(self, handoff_id: HandoffId) -> None:
        source = self._sources[handoff_id]
        self._note(source.sequence, f"lease of {self._leases.duration_s:g} s expired while held")
        self._events.append(LeaseExpired(handoff_id, source.attempt, source.sequence.request_id, Side.SOURCE))
        self._end_held(source)

    def _may_admit_fresh(self) -> bool:
        return True

    def _request_of(self, handoff_id: HandoffId, attempt: int) -> RequestId | None:
        source = self._find(handoff_id, attempt)
        return None if source is None else source.sequence.request_id

    def _parked(self) -> dict[str, list[Sequence]]:
        phases = {"held": SourcePhase.HELD, "draining": SourcePhase.DRAINING}
        parked = {
            name: [source.sequence for source in self._sources.values() if source.phase is phase]
            for name, phase in phases.items()
        }
        return {**parked, "queued": list(self._queued)}

    def _holdings(self) -> tuple[Holding, ...]:
        return tuple(holding(Side.SOURCE, owned, self.now, self._leases) for owned in self._sources.values())
