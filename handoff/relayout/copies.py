"""The two copies of a re-layout, on flat bytes of host memory (numpy) or device memory (CuPy), as `xp` says.

Nothing waits: on a device the copies are in the order of the current stream, and whoever lets the transport touch the
memory next waits for that stream first.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from handoff.relayout.convert import convert, words
from handoff.relayout.routes import Route
from handoff.relayout.shape import KvShape
from handoff.relayout.windows import Cut, Window, cuts

CONVERTED_BYTES = 2 << 20
"""What a cache holds: the copy is still there when it is scattered."""


def pack(pool: Any, route: Route, blocks: Sequence[int], staging: Any, xp: Any = np) -> None:
    """Source: copy the route's heads of `blocks` into `staging`, one block after another.

    pool: flat uint8, the source's blocks and nothing else. blocks: ids, of one window. staging: flat uint8,
    len(blocks) * route.staged_block_bytes long, aligned to 4 bytes. Raises ValueError when a size or a block is wrong.
    """
    own = _of_pool(xp, pool, route.source, blocks)[:, :, :, route.source_heads]
    packed = _staged(xp, staging, route, len(blocks))
    for start, stop in _runs(blocks):
        packed[start:stop] = own[blocks[start] : blocks[start] + stop - start]


def unpack(staging: Any, route: Route, window: Window, blocks: Sequence[int], pool: Any, xp: Any = np) -> None:
    """Destination: copy the window's tokens out of `staging` into the pool, converted; no other byte is written.

    staging: flat uint8, len(window.blocks) * route.staged_block_bytes long, aligned to 4 bytes.
    blocks: the sequence's block table at the destination, from its first token on.
    pool: flat uint8, the destination's blocks and nothing else.
    Raises ValueError when a size or a block is wrong.
    """
    if len(blocks) < window.into.stop:
        raise ValueError(f"a window into block {window.into.stop - 1} of a table of {len(blocks)} blocks")
    source, destination = route.source, route.destination
    target = _of_pool(xp, pool, destination, blocks[window.into.start : window.into.stop])
    target = target[:, :, :, route.destination_heads]
    staged = _staged(xp, staging, route, len(window.blocks))
    for cut in cuts(window, source.block_size, destination.block_size):
        taken = staged[cut.staged, ..., cut.source_offset : cut.source_offset + cut.length, :]
        place = target[..., cut.destination_offset : cut.destination_offset + cut.length, :]
        for part in _parts(route, cut):
            index = xp.asarray([blocks[into] for into in cut.into[part]])
            place[index] = convert(xp, taken[part], source.dtype, destination.dtype)


def _parts(route: Route, cut: Cut) -> list[slice]:
    """A conversion makes a copy first, so it goes in parts of a bounded size; without one all runs go at once."""
    runs = len(cut.into)
    run_bytes = route.destination.bytes_of(len(route.heads)) // route.destination.block_size * cut.length
    at_once = runs if route.source.dtype == route.destination.dtype else max(1, CONVERTED_BYTES // run_bytes)
    return [slice(start, start + at_once) for start in range(0, runs, at_once)]


def _of_pool(xp: Any, pool: Any, shape: KvShape, blocks: Sequence[int]) -> Any:
    """[blocks, layers, 2, local heads, block_size, head_dim], of words."""
    total, rest = divmod(pool.size, shape.block_bytes)
    if rest:
        raise ValueError(f"a pool of {pool.size} bytes is not a whole number of blocks of {shape.block_bytes} bytes")
    outside = [block for block in blocks if not 0 <= block < total]
    if outside:
        raise ValueError(f"blocks {outside} are outside the pool of {total} blocks")
    return words(xp, pool, shape.dtype).reshape(total, *_one_block(shape, len(shape.heads)))


def _staged(xp: Any, staging: Any, route: Route, blocks: int) -> Any:
    """[blocks, layers, 2, heads of the route, block_size, head_dim], of words of the source."""
    if staging.size != blocks * route.staged_block_bytes:
        raise ValueError(f"{staging.size} bytes of staging for {blocks} blocks of {route.staged_block_bytes} bytes")
    shape = _one_block(route.source, len(route.heads))
    return words(xp, staging, route.source.dtype).reshape(blocks, *shape)


def _one_block(shape: KvShape, heads: int) -> tuple[int, ...]:
    return shape.layers, 2, heads, shape.block_size, shape.head_dim


def _runs(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Where neighbours in the pool are neighbours in `blocks`: (start, stop) of each run."""
    starts = [i for i in range(len(blocks)) if i == 0 or blocks[i] != blocks[i - 1] + 1]
    return list(zip(starts, [*starts[1:], len(blocks)], strict=True))
