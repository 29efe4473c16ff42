"""Effects on one device: what a scheduler asks for between steps, done on the KV pool and the spill store.

An effect is checked in full before the pool is touched, so one that is refused has changed no block. All copies go
through the stream that steps run on, which orders them after the last step and before the next.
"""

from collections import Counter
from collections.abc import Sequence

import torch

from device.kv_pool import KvPool
from device.spill import SpillStore
from scheduler.contract import (
    CopyBlocks,
    DeviceError,
    Done,
    DropSequenceState,
    Effect,
    EffectOutcome,
    Exhausted,
    Fault,
    Quiesce,
    RestoreSequenceState,
    Saved,
    SaveSequenceState,
)


class EffectApplier:
    """Applies the effects of one device. Owns `store`."""

    def __init__(self, pool: KvPool, store: SpillStore) -> None:
        self._pool = pool
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
            case _:
                raise _failed(f"unknown effect {effect!r}")
        return Done()

    def _save(self, effect: SaveSequenceState) -> EffectOutcome:
        self._check_table(effect)
        if self._store.holds(effect.request_id):
            raise _failed(f"{effect.request_id}: its state is saved already; restore or drop it first")
        if not self._store.has_room(len(effect.blocks) * self._pool.block_bytes):
            return Exhausted()
        size = self._store.put(effect.request_id, effect.tokens, self._pool.read_blocks(effect.blocks))
        return Exhausted() if size is None else Saved(size)

    def _restore(self, effect: RestoreSequenceState) -> None:
        # Taken out first: the saved state is gone whatever comes after.
        content = self._store.take(effect.request_id, effect.tokens, len(effect.blocks) * self._pool.block_bytes)
        self._check_table(effect)
        self._pool.write_blocks(effect.blocks, content)

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
