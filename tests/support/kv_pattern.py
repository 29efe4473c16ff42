"""KV whose every number says whose it is, and pools of many ranks that hold it: an oracle for re-layouts.

It knows the layout from its definition only: a token at a time, through the block table.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import torch

from handoff.relayout.shape import KvShape

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

BYTES = {"fp32": np.uint32, "fp16": np.uint16, "bf16": np.uint16}
TORCH = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_SIGNED = {"fp32": np.int32, "fp16": np.int16, "bf16": np.int16}
CANARY = 0xA5


def widened(bits: Array, source: str, destination: str) -> Array:
    """Bits of `source` numbers as bits of `destination` numbers, by torch."""
    if source == destination:
        return bits
    numbers = torch.from_numpy(np.ascontiguousarray(bits).view(_SIGNED[source])).view(TORCH[source])
    return numbers.to(TORCH[destination]).view(torch.int32).numpy().view(BYTES[destination])


@cache
def pattern(request: int, layers: int, kv_heads: int, tokens: int, head_dim: int, dtype: str) -> Array:
    """Bits of finite numbers, f(request, layer, K or V, head, position, dimension): [layers, 2, heads, tokens, dim]."""
    axes = np.ogrid[0:layers, 0:2, 0:kv_heads, 0:tokens, 0:head_dim]
    mixed = np.full(1, request, np.uint64)
    for axis in axes:
        mixed = (mixed * np.uint64(31) + axis.astype(np.uint64) + np.uint64(1)) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = mixed ^ (mixed >> np.uint64(29))
    bits = (mixed >> np.uint64(17)).astype(BYTES[dtype])
    exponent = {"fp32": 0x40000000, "fp16": 0x4000, "bf16": 0x4000}[dtype]
    return bits & ~BYTES[dtype](exponent)  # the highest bit of the exponent: neither an infinity nor NaN


class RankPools:
    """The pools of all ranks of one replica, filled with canaries, and one sequence's blocks in random order.

    blocks: its table, the same on all ranks, with one block more than the tokens need. staging: bytes behind each pool.
    """

    def __init__(self, shape: KvShape, tokens: int, seed: int, staging: int = 0) -> None:
        self.shapes = [replace(shape, rank=rank) for rank in range(shape.ranks)]
        count = -(-tokens // shape.block_size) + 1
        self.total = count + 3
        self.blocks: list[int] = np.random.default_rng(seed).permutation(self.total)[:count].tolist()
        size = self.total * shape.block_bytes
        self.memories = [np.full(size + staging, CANARY, np.uint8) for _ in self.shapes]
        self.pools = [memory[:size] for memory in self.memories]
        self.stagings = [memory[size:] for memory in self.memories]

    def put(self, truth: Array, tokens: range) -> None:
        """Write tokens of the sequence as their owner would. truth: [layers, 2, all heads, tokens, dim]."""
        for shape, pool in zip(self.shapes, self.pools, strict=True):
            view = pool.view(BYTES[shape.dtype]).reshape(
                self.total, shape.layers, 2, len(shape.heads), shape.block_size, shape.head_dim
            )
            for token in tokens:
                block = self.blocks[token // shape.block_size]
                view[block, :, :, :, token % shape.block_size] = truth[
                    :, :, shape.heads.start : shape.heads.stop, token
                ]


def differing(found: RankPools, wanted: RankPools) -> Sequence[int]:
    """Ranks whose pools differ in any byte."""
    return [
        rank for rank, pools in enumerate(zip(found.pools, wanted.pools, strict=True)) if not np.array_equal(*pools)
    ]
