"""Effects on one device: what a scheduler asks for between steps, done on the KV pool, the slots and the spill store.

An effect is checked in full before anything is touched, so one that is refused has changed no block and no slot. All
copies go through the stream that steps run on, which orders them after the last step and before the next.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import structlog
import torch

from device.kv_pool import Bytes, KvPool
from device.spill import SpillStore
from device.state import SlotState
from scheduler.contract import DeviceError, Fault
from scheduler.effects import (
    NO_SLOT,
    CompactSlot,
    CopyBlocks,
    DetachSlot,
    Done,
    DropSequenceState,
    Effect,
    EffectOutcome,
    Exhausted,
    MarconiCheckpoint,
    Quiesce,
    ReleaseSeq,
    RestoreSequenceState,
    Saved,
    SaveHiddenCatchup,
    SaveSequenceState,
    SsmSnapshotRestore,
    SsmSnapshotSave,
)

_log = structlog.get_logger()


class EffectApplier:
    """Applies the effects of one device. Owns `store`."""

    def __init__(self, pool: KvPool, state: SlotState, store: SpillStore) -> None:
        self._pool = pool
        self._state = state
        self._store = store

    def apply(self, effect: Effect) -> EffectOutcome:
        """See DeviceIo. A restore that fails, for whatever reason, has dropped the saved state."""
        try:
            return self._apply(effect)
        except DeviceError:
            raise
        except (RuntimeError, MemoryError) as error:
            raise _failed(f"{type(effect).__name__}: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Drop all that is saved."""
        self._store.close()

    def _apply(self, effect: Effect) -> EffectOutcome:
        match effect:
            case Quiesce():
                if self._pool.device.type == "cuda":
                    torch.cuda.synchronize(self._pool.device)
            case CopyBlocks(pairs):
                self._check_copy(pairs)
                self._pool.copy_blocks(pairs)
            case SaveSequenceState():
                return self._save(effect)
            case RestoreSequenceState():
                self._restore(effect)
            case DropSequenceState(request_id):
                self._store.drop(request_id)
            case ReleaseSeq():
                self._release(effect)
            case CompactSlot(_, slot, target):
                self._state.move(slot, target)
            case DetachSlot():
                pass  # who owns a slot is the scheduler's to know; the content stays
            case MarconiCheckpoint():
                self._checkpoint(effect)
            case SsmSnapshotSave(_, slot, snapshot):
                self._check_recurrent(effect)
                self._state.save(slot, snapshot)
            case SsmSnapshotRestore(_, slot, snapshot):
                self._check_recurrent(effect)
                self._state.restore(snapshot, slot)
            case SaveHiddenCatchup():
                raise DeviceError(Fault.UNSUPPORTED, "the model has no multi-token-prediction head")
            case _:
                raise _failed(f"unknown effect {effect!r}")
        return Done()

    def _release(self, effect: ReleaseSeq) -> None:
        if effect.slot == NO_SLOT:
            return
        try:
            self._state.zero(effect.slot)
        except RuntimeError as error:
            _log.error("slot not zeroed", request_id=effect.request_id, what=effect.what, error=str(error))

    def _checkpoint(self, effect: MarconiCheckpoint) -> None:
        """What could not be kept is noticed by whoever wants it back, see SlotState."""
        if not self._state.slot_bytes:
            return
        try:
            self._state.save(effect.slot, effect.snapshot, effect.tokens)
        except RuntimeError as error:
            _log.error("checkpoint not made", request_id=effect.request_id, error=str(error))

    def _check_recurrent(self, effect: Effect) -> None:
        if not self._state.slot_bytes:
            raise DeviceError(Fault.UNSUPPORTED, f"{type(effect).__name__}: the model has no recurrent state")

    def _save(self, effect: SaveSequenceState) -> EffectOutcome:
        self._check_table(effect)
        if self._state.slot_bytes:
            self._state.require(effect.slot, effect.tokens)
        if self._store.holds(effect.request_id):
            raise _failed(f"{effect.request_id}: its state is saved already; restore or drop it first")
        kv_bytes = len(effect.blocks) * self._pool.block_bytes
        if not self._store.has_room(kv_bytes + self._state.slot_bytes):
            return Exhausted()
        content: Bytes = np.empty(kv_bytes + self._state.slot_bytes, np.uint8)
        self._pool.read_blocks(effect.blocks, content[:kv_bytes])
        if self._state.slot_bytes:
            self._state.read(effect.slot, content[kv_bytes:])
        size = self._store.put(effect.request_id, effect.tokens, content)
        return Exhausted() if size is None else Saved(size)

    def _restore(self, effect: RestoreSequenceState) -> None:
        # Taken out first: the saved state is gone whatever comes after.
        kv_bytes = len(effect.blocks) * self._pool.block_bytes
        content = self._store.take(effect.request_id, effect.tokens, kv_bytes + self._state.slot_bytes)
        self._check_table(effect)
        record = content[kv_bytes:]
        if self._state.slot_bytes:
            self._state.check_record(effect.slot, record, effect.tokens)
        self._pool.write_blocks(effect.blocks, content[:kv_bytes])
        if self._state.slot_bytes:
            self._state.write(effect.slot, record, effect.tokens)

    def _check_copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self._check_ids("a copy", (source, target))
            if source == target:
                raise _failed(f"a copy of block {source} onto itself")
        self._check_once("a copy", [target for _, target in pairs])

    def _check_table(self, effect: SaveSequenceState | RestoreSequenceState) -> None:
        name, given, size = effect.request_id, len(effect.blocks), self._pool.geometry.block_size
        if effect.tokens < 1:
            raise _failed(f"{name}: a state of {effect.tokens} tokens; it has at least 1")
        needed = -(-effect.tokens // size)
        if given != needed:
            raise _failed(f"{name}: {effect.tokens} tokens fill {needed} blocks of {size}, {given} were given")
        self._check_ids(name, effect.blocks)
        self._check_once(name, effect.blocks)

    def _check_ids(self, who: str, blocks: Sequence[int]) -> None:
        total = self._pool.total_blocks
        for block in blocks:
            if not 0 <= block < total:
                raise _failed(f"{who}: block id {block} is outside 0 to {total - 1}")

    def _check_once(self, who: str, blocks: Sequence[int]) -> None:
        if len(set(blocks)) != len(blocks):
            block, times = Counter(blocks).most_common(1)[0]
            raise _failed(f"{who}: block {block} stands there {times} times")


def _failed(message: str) -> DeviceError:
    return DeviceError(Fault.EFFECT, message)
