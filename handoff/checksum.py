"""A checksum over the content of blocks, made by the source before it sends and by the destination once all landed.

Hashing every byte costs as much as moving it over shared memory, so "sampled" looks at one cache line in SAMPLE_BYTES.
What goes wrong with a block goes wrong with much of it: it was another's, or overwritten while it was read. Successive
samples shift by one line, so that no token's place in a block is never looked at.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import xxhash

from handoff.pool_arrays import as_array

Checksums: TypeAlias = Literal["sampled", "full", "off"]
LINE_BYTES = 64
SAMPLE_BYTES = 8192
_WORD = 8


class ContentHash:
    """xxh3, 64 bits, of blocks and stretches of a registered pool (see Transport.start)."""

    def __init__(self, pool: Any) -> None:
        self._xp, self._pool = as_array(pool)
        self._views: dict[tuple[Checksums, int, int], Any] = {}

    def of(
        self,
        mode: Checksums,
        block_bytes: int,
        blocks: Sequence[int],
        stretches: Sequence[tuple[int, int]] = (),
        origin: int = 0,
    ) -> int:
        """Of these blocks in this order, then of (offset, length) stretches in full; 0 in mode "off".

        origin: the offset at which block 0 begins. Both sides of a transfer must use one mode.
        """
        if mode == "off":
            return 0
        digest = xxhash.xxh3_64()
        if blocks:
            digest.update(self._host(self._view(mode, block_bytes, origin)[self._xp.asarray(blocks)]))
        for offset, length in stretches:
            digest.update(self._host(self._pool[offset : offset + length]))
        return digest.intdigest()

    def _view(self, mode: Checksums, block_bytes: int, origin: int) -> Any:
        key = mode, block_bytes, origin
        if key not in self._views:
            blocks = (len(self._pool) - origin) // block_bytes
            whole = self._pool[origin : origin + blocks * block_bytes].reshape(blocks, block_bytes)
            sampled = mode == "sampled" and block_bytes % LINE_BYTES == 0 and block_bytes >= 2 * SAMPLE_BYTES
            self._views[key] = self._lines(whole) if sampled else whole
        return self._views[key]

    def _lines(self, blocks: Any) -> Any:
        """uint64 [blocks, samples, words of a line], a view of the pool."""
        words = blocks.view(np.uint64)
        step = SAMPLE_BYTES + LINE_BYTES
        samples = (blocks.shape[1] - LINE_BYTES) // step + 1
        strides = (blocks.shape[1], step, _WORD)
        shape = (len(words), samples, LINE_BYTES // _WORD)
        return self._xp.lib.stride_tricks.as_strided(words, shape, strides)

    def _host(self, array: Any) -> Any:
        return np.ascontiguousarray(array if self._xp is np else array.get())
