"""The source side: prefill, sample the first token, hold the KV until the handoff is over.

SubmitHandoffPrefill -> PENDING --first token--> HELD --Release/Cancel--> retired
                           |          |            `--while sending--> DRAINING --quiet--> retired
                           |          `--request ended by it--> retired (SourceFinished)
                           `--Cancel--> retired
"""

from dataclasses import dataclass
from enum import Enum

from scheduler.base import SchedulerBase
from scheduler.batching import BatchLimits
from scheduler.commands import (
    Applied,
    CancelSource,
    Command,
    CommandResult,
    Noop,
    ReleaseSource,
    SourceFinished,
    SourceHeld,
    SubmitHandoffPrefill,
    Submitted,
)
from scheduler.errors import CommandRejected
from scheduler.ids import BlockId, HandoffId, RequestId
from scheduler.request import FinishReason
from scheduler.sequence import Sequence


class SourcePhase(Enum):
    PENDING = "pending"
    HELD = "held"
    DRAINING = "draining"


@dataclass(slots=True, eq=False)
class Source:
    handoff_id: HandoffId
    attempt: int
    sequence: Sequence
    phase: SourcePhase = SourcePhase.PENDING
    sending: bool = False


@dataclass(frozen=True, slots=True)
class HeldKv:
    """What a transfer needs of a held source. blocks: those of the prompt, in order."""

    request_id: RequestId
    prompt_tokens: int
    first_token: int
    blocks: tuple[BlockId, ...]


class PrefillScheduler(SchedulerBase):
    """A prefill node's scheduler."""

    def __init__(
        self,
        total_blocks: int,
        block_size: int,
        limits: BatchLimits,
        *,
        max_model_len: int,
        prefix_caching: bool = True,
    ) -> None:
        super().__init__(total_blocks, block_size, limits, max_model_len=max_model_len, prefix_caching=prefix_caching)
        self._sources: dict[HandoffId, Source] = {}
        self._source_of: dict[RequestId, Source] = {}

    def _perform(self, command: Command) -> CommandResult:
        match command:
            case SubmitHandoffPrefill(handoff_id, request, attempt):
                if handoff_id in self._sources:
                    raise CommandRejected(f"handoff {handoff_id} is already a source on this node")
                sequence = self._start(request, output_limit=1)
                source = Source(handoff_id, attempt, sequence)
                self._sources[handoff_id] = self._source_of[request.request_id] = source
                return Submitted(request.request_id)
            case ReleaseSource(handoff_id, attempt):
                return self._end(self._find(handoff_id, attempt), cancel=False)
            case CancelSource(handoff_id, attempt):
                return self._end(self._find(handoff_id, attempt), cancel=True)
            case _:
                return super()._perform(command)

    def held(self, handoff_id: HandoffId, attempt: int) -> HeldKv | None:
        """The KV to send, or None if this handoff holds nothing here."""
        source = self._find(handoff_id, attempt)
        if source is None or source.phase is not SourcePhase.HELD:
            return None
        sequence = source.sequence
        return HeldKv(
            request_id=sequence.request.request_id,
            prompt_tokens=sequence.prompt_tokens,
            first_token=sequence.tokens[-1],
            blocks=tuple(sequence.blocks),
        )

    def transfer_started(self, handoff_id: HandoffId, attempt: int) -> None:
        """The transport may read the held blocks until `transfer_quiet`."""
        source = self._find(handoff_id, attempt)
        if source is not None:
            source.sending = True

    def transfer_quiet(self, handoff_id: HandoffId, attempt: int) -> None:
        """The transport is done with the blocks, with or without success."""
        source = self._find(handoff_id, attempt)
        if source is None:
            return
        source.sending = False
        if source.phase is SourcePhase.DRAINING:
            self._drop(source)

    def _find(self, handoff_id: HandoffId, attempt: int) -> Source | None:
        source = self._sources.get(handoff_id)
        return source if source is not None and source.attempt == attempt else None

    def _end(self, source: Source | None, *, cancel: bool) -> CommandResult:
        if source is None or source.phase is SourcePhase.DRAINING:
            return Noop()
        if source.phase is SourcePhase.PENDING:
            if cancel:
                self._remove_scheduled(source.sequence)
            else:
                # Released before it was held: the prefill goes on and frees its KV when it ends.
                self._forget(source.sequence)
            return Applied()
        if source.sending:
            source.phase = SourcePhase.DRAINING
        else:
            self._drop(source)
        return Applied()

    def _drop(self, source: Source) -> None:
        self._forget(source.sequence)
        self._retire(source.sequence)

    def _forget(self, sequence: Sequence) -> None:
        source = self._source_of.pop(sequence.request.request_id, None)
        if source is not None:
            del self._sources[source.handoff_id]

    def _ended(self, sequence: Sequence, finish: FinishReason | None) -> None:
        source = self._source_of.get(sequence.request.request_id)
        if source is None:
            self._retire(sequence)
        elif finish is not None:
            self._events.append(SourceFinished(source.handoff_id, source.attempt, sequence.request.request_id, finish))
            self._drop(source)
        else:
            source.phase = SourcePhase.HELD
            self._events.append(
                SourceHeld(
                    handoff_id=source.handoff_id,
                    attempt=source.attempt,
                    request_id=sequence.request.request_id,
                    prompt_tokens=sequence.prompt_tokens,
                    cached_tokens=sequence.cached,
                )
            )

    def _may_admit_fresh(self) -> bool:
        return True

    def _at_boundary(self) -> None:
        return None

    def _parked_blocks(self) -> tuple[int, int, int]:
        held = sum(len(s.sequence.blocks) for s in self._sources.values() if s.phase is SourcePhase.HELD)
        draining = sum(len(s.sequence.blocks) for s in self._sources.values() if s.phase is SourcePhase.DRAINING)
        return held, 0, draining

    def _waiting_elsewhere(self) -> int:
        return 0
