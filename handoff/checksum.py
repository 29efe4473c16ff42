"""A checksum over the content of blocks, made by the source before it sends and by the destination once all landed.

Hashing every byte costs as much as moving it over shared memory, so "sampled" looks at one cache line in SAMPLE_BYTES.
What goes wrong with a block goes wrong with much of it: it was another's, or overwritten while it was read. Successive
samples shift by one line, so that no token's place in a block is never looked at.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import xxhash

Checksums: TypeAlias = Literal["sampled", "full", "off"]
LINE_BYTES = 64
SAMPLE_BYTES = 8192
_WORD = 8


class ContentHash:
    """xxh3, 64 bits, of blocks and stretches of a registered pool (see Transport.start)."""

    def __init__(self, pool: Any, block_bytes: int, mode: Checksums) -> None:
        self._mode = mode
        self._block_bytes = block_bytes
        if mode == "off":
            return
        if hasattr(pool, "__cuda_array_interface__"):
            import cupy  # only where the pool is on a GPU

            self._xp: Any = cupy
        else:
            self._xp = np
        self._pool = self._xp.asarray(pool)
        self._sampled = mode == "sampled" and block_bytes % LINE_BYTES == 0 and block_bytes >= 2 * SAMPLE_BYTES
        blocks = self._pool[: len(self._pool) // block_bytes * block_bytes].reshape(-1, block_bytes)
        self._blocks = self._lines(blocks) if self._sampled else blocks

    def of(self, blocks: Sequence[int], stretches: Sequence[tuple[int, int]] = ()) -> int:
        """Of these blocks in this order, then of (offset, length) stretches in full; 0 in mode "off"."""
        if self._mode == "off":
            return 0
        digest = xxhash.xxh3_64()
        if blocks:
            digest.update(self._host(self._blocks[self._xp.asarray(blocks)]))
        for offset, length in stretches:
            digest.update(self._host(self._pool[offset : offset + length]))
        return digest.intdigest()

    def _lines(self, blocks: Any) -> Any:
        """uint64 [blocks, samples, words of a line], a view of the pool."""
        words = blocks.view(np.uint64)
        step = SAMPLE_BYTES + LINE_BYTES
        samples = (self._block_bytes - LINE_BYTES) // step + 1
        strides = (self._block_bytes, step, _WORD)
        shape = (len(words), samples, LINE_BYTES // _WORD)
        return self._xp.lib.stride_tricks.as_strided(words, shape, strides)

    def _host(self, array: Any) -> Any:
        host = array if self._xp is np else array.get()
        return np.ascontiguousarray(host)
