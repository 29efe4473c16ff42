"""A whole re-layout without a network: between all ranks, window by window, as a source and a destination would."""

from typing import Any

import numpy as np
from kv_pattern import RankPools, differing, pattern, widened

from handoff.relayout.copies import pack, unpack
from handoff.relayout.pieces import pieces_of_pool
from handoff.relayout.routes import Route, routes
from handoff.relayout.shape import KvShape
from handoff.relayout.windows import Window, windows


def staged(route: Route, pool: Any, blocks: list[int]) -> Any:
    """What arrives in the staging area for a window of these blocks."""
    area = np.full(len(blocks) * route.staged_block_bytes, 0xEE, np.uint8)
    if route.whole:
        for send, receive in zip(*pieces_of_pool(route, blocks, 0), strict=True):
            area[receive.offset : receive.offset + receive.length] = pool[send.offset : send.offset + send.length]
    else:
        pack(pool, route, blocks, area)
    return area


def relayout(source: RankPools, destination: RankPools, tokens: range, staged_blocks: int, turn: int = 0) -> None:
    one, other = source.shapes[0], destination.shapes[0]
    plan: list[Window] = windows(one.block_size, other.block_size, tokens, staged_blocks)
    for (s, d), route in routes(one, other, turn).items():
        for window in plan:
            blocks = [source.blocks[index] for index in window.blocks]
            area = staged(route, source.pools[s], blocks)
            unpack(area, route, window, destination.blocks, destination.pools[d])


def ranks_with_other_bytes(
    source: KvShape, destination: KvShape, tokens: range, staged_blocks: int, turn: int = 0
) -> list[int]:
    """Re-lay out positions `tokens` of a sequence; destination ranks that hold anything else than they must."""
    truth = pattern(7, source.layers, source.kv_heads, tokens.stop, source.head_dim, source.dtype)
    sender = RankPools(source, tokens.stop, seed=1)
    sender.put(truth, range(tokens.stop))
    found, wanted = (RankPools(destination, tokens.stop, seed=2) for _ in range(2))
    wanted.put(widened(truth, source.dtype, destination.dtype), tokens)
    relayout(sender, found, tokens, staged_blocks, turn)
    return list(differing(found, wanted))
