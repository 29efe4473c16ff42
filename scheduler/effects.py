"""Effects: what a scheduler may ask of a device between steps, and what a device answers, as frozen data.

Source: the Effect page in the project's seeds, all 14 of it; CopyBlocks, RestoreSequenceState and DropSequenceState are
extensions of ours.
"""

from dataclasses import dataclass
from typing import NewType, TypeAlias

from scheduler.ids import BlockId, RequestId

Ticket = NewType("Ticket", int)
"""One launched step."""
NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class Quiesce:
    """Block until everything that was launched has finished on the device."""


@dataclass(frozen=True, slots=True)
class CopyBlocks:
    """Copy whole blocks in the KV pool, (source, target) in this order, before the next launch. An extension of ours.

    A block that is shared and must be written is copied first; the writer gets the copy.
    """

    pairs: tuple[tuple[BlockId, BlockId], ...]


@dataclass(frozen=True, slots=True)
class ReleaseSeq:
    """A sequence is over on this device, or gives up its place: its slot is zeroed and free for another.

    what: the caller's label, for logs. Never fails.
    """

    request_id: RequestId
    slot: int
    what: str


@dataclass(frozen=True, slots=True)
class CompactSlot:
    """Move a live sequence's slot-addressed state to the free slot `target`; the old one is free after it."""

    request_id: RequestId
    slot: int
    target: int


@dataclass(frozen=True, slots=True)
class DetachSlot:
    """The sequence owns this slot no more; its content stays for another, who has it or is about to. Never fails."""

    request_id: RequestId
    slot: int


@dataclass(frozen=True, slots=True)
class SaveSequenceState:
    """Spill: put the state of one sequence, `tokens` positions of KV in `blocks` and its slot, into the spill store.

    The blocks and the slot may be overwritten as soon as this is answered. Answers Saved, or Exhausted when the store
    has no room; a store that fails is a DeviceError(EFFECT). Nothing is stored unless the answer is Saved.
    """

    request_id: RequestId
    blocks: tuple[BlockId, ...]
    tokens: int
    slot: int = NO_SLOT


@dataclass(frozen=True, slots=True)
class RestoreSequenceState:
    """Bring a saved state back, all of it or nothing, into `blocks` and `slot`, and drop it from the store.

    Raises DeviceError(EFFECT) when it is missing, damaged or of another size; it is dropped then as well.
    """

    request_id: RequestId
    blocks: tuple[BlockId, ...]
    tokens: int
    slot: int = NO_SLOT


@dataclass(frozen=True, slots=True)
class DropSequenceState:
    """Forget a saved state; nothing happens if there is none."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class ReadLogits:
    """The logits of `rows` of the step settled last, for a draw that needs the host. Answers HostLogits."""

    ticket: Ticket
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MarconiCheckpoint:
    """Keep a copy of a sequence's slot-addressed state, as it is after `tokens` tokens, in `snapshot` for the prefix
    cache (source: Marconi, arXiv 2411.19379). On a model without recurrent state nothing happens. Never fails.
    """

    request_id: RequestId
    slot: int
    tokens: int
    snapshot: int


@dataclass(frozen=True, slots=True)
class SsmSnapshotSave:
    """Copy the slot-addressed state of `slot` into `snapshot`."""

    request_id: RequestId
    slot: int
    snapshot: int


@dataclass(frozen=True, slots=True)
class SsmSnapshotRestore:
    """Copy `snapshot` into the slot-addressed state of `slot`."""

    request_id: RequestId
    slot: int
    snapshot: int


@dataclass(frozen=True, slots=True)
class SaveHiddenCatchup:
    """Keep the hidden state of a row for a multi-token-prediction head; DeviceError(UNSUPPORTED) on a model without."""

    row: int
    position: int


@dataclass(frozen=True, slots=True)
class SyncSecondary:
    """The next step waits for all copies that run beside the steps. The host does not wait."""


@dataclass(frozen=True, slots=True)
class EpShutdown:
    """Tell the mirror ranks to stop. Once, at shutdown, before the last Quiesce. Never fails."""


@dataclass(frozen=True, slots=True)
class ReserveKv:
    """The next fed step may write the position after a sequence's newest one, in `blocks`: those that were added to its
    table for it, which may be none. Answers Reserved. (The pool is the scheduler's, so it knows itself when there is no
    block, and does not run ahead then.)
    """

    request_id: RequestId
    blocks: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class Rollback:
    """The newest fed step of a sequence was an over-run: its newest reservation is void. Answers Reserved with the
    blocks that go back; DeviceError(UNSUPPORTED) on a router that never runs ahead.
    """

    request_id: RequestId


Effect: TypeAlias = (
    ReleaseSeq
    | CompactSlot
    | DetachSlot
    | SaveSequenceState
    | RestoreSequenceState
    | DropSequenceState
    | CopyBlocks
    | ReadLogits
    | MarconiCheckpoint
    | SsmSnapshotSave
    | SsmSnapshotRestore
    | SaveHiddenCatchup
    | SyncSecondary
    | EpShutdown
    | Quiesce
    | ReserveKv
    | Rollback
)


@dataclass(frozen=True, slots=True)
class Done:
    """The effect was applied."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A sequence's state is in the spill store. size: in bytes."""

    size: int


@dataclass(frozen=True, slots=True)
class Exhausted:
    """There is no room for it. Not an error: the caller does without."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """Blocks of a reservation, made or taken back."""

    blocks: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class HostLogits:
    """Logits on the host: rows x vocabulary, row-major, little-endian. element_bytes: 2 is bf16, 4 is fp32."""

    content: bytes
    element_bytes: int


EffectOutcome: TypeAlias = Done | Saved | Exhausted | Reserved | HostLogits
