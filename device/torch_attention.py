"""Paged attention in plain torch: the reference back end, on any device.

One-token rows of all sequences go together: their blocks are gathered side by side, padded to the longest, and one
masked SDPA call serves them all. A longer row is cut into tiles of queries, and each tile sees only the keys that
it may see, so that no mask grows with the square of the context.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from device.attention import register_backend
from device.batch import Batch, Span
from device.kv_pool import KvPool
from device.upload import upload

TILE = 512
"""Queries per SDPA call where a mask is needed."""


class TorchAttention:
    """The back end named "torch"."""

    def __init__(self) -> None:
        self._windows: set[int | None] = set()

    def plan(self, pool: KvPool, batch: Batch) -> "TorchAttentionStep":
        """What decode rows see is worked out here for the windows that layers had before: the host has time for it
        while the device computes the step before.
        """
        return TorchAttentionStep(pool, batch, self._windows)


class TorchAttentionStep:
    """See AttentionStep. windows: those that layers were seen to have; new ones are added."""

    def __init__(self, pool: KvPool, batch: Batch, windows: set[int | None]) -> None:
        self._pool = pool
        self._place_index = pool.place_index(batch.places)
        self._singles = [span for span in batch.spans if span.count == 1]
        self._chunks = [span for span in batch.spans if span.count > 1]
        mixed = [span.offset for span in self._singles] if self._chunks else []
        (self._single_offsets,) = upload(pool.device, mixed)
        self._windows = windows
        known = tuple(windows) if self._singles else ()
        self._single_context = {window: _single_context(pool, self._singles, window) for window in known}
        self._chunk_context: dict[tuple[int, int | None], _ChunkContext] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
        self._pool.write(layer, self._place_index, k, v)
        if not self._chunks:
            return self._attend_singles(layer, q, scaling, window).unsqueeze(0)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if self._singles:
            singles = q.index_select(0, self._single_offsets)
            out.index_copy_(0, self._single_offsets, self._attend_singles(layer, singles, scaling, window))
        for span in self._chunks:
            part = slice(span.offset, span.offset + span.count)
            out[part] = self._attend_chunk(layer, span, (q[part], k[part], v[part]), scaling, window)
        return out.unsqueeze(0)

    def _attend_singles(self, layer: int, q: Tensor, scaling: float, window: int | None) -> Tensor:
        """q: [sequences, heads, head_dim]; returns the same shape.

        The query heads of one KV head stand where queries stand, which spares copying K and V per head.
        """
        context = self._single_context.get(window)
        if context is None:
            context = self._single_context[window] = _single_context(self._pool, self._singles, window)
            self._windows.add(window)
        k, v = self._pool.gather(layer, context.pages, len(self._singles))
        grouped = q.reshape(len(self._singles), k.shape[1], -1, q.shape[-1])
        out = scaled_dot_product_attention(grouped, k, v, attn_mask=context.mask, scale=scaling)
        return out.reshape(q.shape)

    def _attend_chunk(
        self, layer: int, span: Span, qkv: tuple[Tensor, Tensor, Tensor], scaling: float, window: int | None
    ) -> Tensor:
        """q: [count, heads, head_dim]; k, v: [count, kv_heads, head_dim]. Returns the shape of q."""
        q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in qkv)
        if span.start == 0 and (window is None or window >= span.count):
            out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
            return out[0].transpose(0, 1)
        context = self._chunk_context.get((span.offset, window))
        if context is None:
            context = _chunk_context(self._pool, span, window)
            self._chunk_context[span.offset, window] = context
        k, v = self._pool.gather(layer, context.pages, 1)
        tiles = [_attend_tile(q, k, v, tile, scaling) for tile in context.tiles]
        return torch.cat(tiles, dim=2)[0].transpose(0, 1)


@dataclass(frozen=True, slots=True)
class _SingleContext:
    """What one-token rows see. mask: additive, [sequences, 1, 1, padded context]."""

    pages: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class _Tile:
    """Queries [first, last) of a chunk over gathered keys [key_first, key_last). mask: additive, [queries, keys]."""

    first: int
    last: int
    key_first: int
    key_last: int
    mask: Tensor


@dataclass(frozen=True, slots=True)
class _ChunkContext:
    pages: Tensor
    tiles: tuple[_Tile, ...]


def _single_context(pool: KvPool, spans: Sequence[Span], window: int | None) -> _SingleContext:
    size = pool.geometry.block_size
    lengths = np.array([span.length for span in spans], dtype=np.int64)
    visible_from = np.zeros_like(lengths) if window is None else np.maximum(lengths - window, 0)
    first_block, last_block = visible_from // size, -(-lengths // size)
    width = int((last_block - first_block).max())
    tables: list[int] = []
    for span, first, last in zip(spans, first_block.tolist(), last_block.tolist(), strict=True):
        used = span.blocks[first:last]
        tables += used
        tables += [used[0]] * (width - len(used))  # the padding reads the sequence's own memory, never another's
    pages = pool.page_index(upload(pool.device, tables)[0].view(len(spans), width))
    position = (first_block * size)[:, None] + np.arange(width * size)
    hidden = (position >= lengths[:, None]) | (position < visible_from[:, None])
    return _SingleContext(pages, _additive(hidden, pool)[:, None, None, :])


def _chunk_context(pool: KvPool, span: Span, window: int | None) -> _ChunkContext:
    size = pool.geometry.block_size
    first_block = 0 if window is None else max(0, span.start - window + 1) // size
    blocks = list(span.blocks[first_block : -(-span.length // size)])
    pages = pool.page_index(upload(pool.device, blocks)[0].unsqueeze(0))
    bounds = [(first, min(first + TILE, span.count)) for first in range(0, span.count, TILE)]
    return _ChunkContext(pages, tuple(_tile(pool, span, bound, first_block * size, window) for bound in bounds))


def _tile(pool: KvPool, span: Span, queries: tuple[int, int], origin: int, window: int | None) -> _Tile:
    """origin: the position of the first gathered key."""
    first, last = span.start + queries[0], span.start + queries[1]
    key_first = origin if window is None else max(origin, first - window + 1)
    query, key = np.arange(first, last)[:, None], np.arange(key_first, last)
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    return _Tile(*queries, key_first - origin, last - origin, _additive(hidden, pool))


def _additive(hidden: "np.ndarray[tuple[int, ...], np.dtype[np.bool_]]", pool: KvPool) -> Tensor:
    mask = torch.zeros(hidden.shape, dtype=pool.geometry.dtype, device=pool.device)
    (where,) = upload(pool.device, hidden.ravel(), dtype=np.bool_)
    return mask.masked_fill_(where.view(mask.shape), float("-inf"))


def _attend_tile(q: Tensor, k: Tensor, v: Tensor, tile: _Tile, scaling: float) -> Tensor:
    keys = slice(tile.key_first, tile.key_last)
    q, k, v = q[:, :, tile.first : tile.last], k[:, :, keys], v[:, :, keys]
    if q.is_cuda:
        # With a mask, CUDA has no fused kernel for grouped heads.
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=tile.mask, scale=scaling, enable_gqa=not q.is_cuda)


register_backend("torch", TorchAttention)
