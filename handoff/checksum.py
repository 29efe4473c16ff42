"""A checksum over the content of blocks, made by the source before it sends and by the destination once all landed.

Hashing every byte costs more than moving it over shared memory, so "sampled" looks at one cache line in SAMPLE_BYTES,
and at one of a block at least. A line that nobody has read lately costs a hundred nanoseconds, which is why
there are so few. What goes wrong with a block goes wrong with much of it: it was another's, or overwritten while it was
read. The lines shift by one from block to block of a table, so that over a long prompt no place is never looked at.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Literal, TypeAlias

import numpy as np
import xxhash

from handoff.pieces import Part
from handoff.pool_arrays import as_array

Checksums: TypeAlias = Literal["sampled", "full", "off"]
LINE_BYTES = 64
SAMPLE_BYTES = 64 << 10
SMALL_BYTES = 16 << 10
"""Smaller blocks are hashed in full, and so are those that are no whole lines."""
_WORD_BYTES = 8


class ContentHash:
    """xxh3, 64 bits, of blocks and stretches of a registered pool (see Transport.start)."""

    def __init__(self, pool: Any) -> None:
        self._xp, self._pool = as_array(pool)
        # On a GPU a stream that does not wait for the model's: what is hashed is final, and a step may be running.
        self._stream: Any = nullcontext() if self._xp is np else self._xp.cuda.Stream(non_blocking=True)

    def of(
        self,
        mode: Checksums,
        block_bytes: int,
        blocks: Sequence[int],
        stretches: Sequence[tuple[int, int]] = (),
        origin: int = 0,
        part: Part | None = None,
    ) -> int:
        """Of these blocks in this order, then of (offset, length) stretches in full; 0 in mode "off".

        origin: the offset at which block 0 begins. part: of each block, None for all of it. Both sides of a transfer
        must use one mode.
        """
        if mode == "off":
            return 0
        digest = xxhash.xxh3_64()
        with self._stream:
            if blocks:
                ids = self._xp.asarray(blocks)
                digest.update(self._host(self._looked_at(mode, block_bytes, ids, origin, part or (0, block_bytes))))
            for offset, length in stretches:
                digest.update(self._host(self._pool[offset : offset + length]))
        return digest.intdigest()

    def _looked_at(self, mode: Checksums, block_bytes: int, ids: Any, origin: int, part: Part) -> Any:
        """What is hashed of these blocks, a copy."""
        start, length = part
        whole = self._pool[origin : origin + (len(self._pool) - origin) // block_bytes * block_bytes]
        in_lines = not any(size % LINE_BYTES for size in (block_bytes, start, length))
        if mode == "full" or not in_lines or length < SMALL_BYTES:
            return whole.reshape(-1, block_bytes)[:, start : start + length][ids]
        in_block, in_part, samples = block_bytes // LINE_BYTES, length // LINE_BYTES, max(1, length // SAMPLE_BYTES)
        firsts = self._xp.arange(samples) * (in_part // samples)
        shifts = self._xp.arange(len(ids))[:, None]
        lines = (firsts + shifts) % in_part + start // LINE_BYTES + ids[:, None] * in_block
        return whole.view(np.uint64).reshape(-1, LINE_BYTES // _WORD_BYTES).take(lines, axis=0)

    def _host(self, array: Any) -> Any:
        return np.ascontiguousarray(array if self._xp is np else array.get())
