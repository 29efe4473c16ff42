"""A step's rows packed into one row of tokens, on the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from device.upload import upload
from scheduler.contract import Row
from scheduler.effects import NO_SLOT


@dataclass(frozen=True, slots=True)
class Span:
    """One row's share of the packed tokens.

    offset: its first token in the pack. count: how many. start: the position of the first in its sequence.
    """

    offset: int
    count: int
    start: int
    blocks: Sequence[int]
    slot: int = NO_SLOT

    @property
    def length(self) -> int:
        """How many positions of the sequence have KV once this step has run."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Batch:
    """token_ids, positions: int64 [1, tokens]. places: int64 [tokens], see KvPool.

    drawn: int64 [rows with a draw], the pack index of each such row's last token.
    """

    token_ids: Tensor
    positions: Tensor
    places: Tensor
    drawn: Tensor
    spans: tuple[Span, ...]


def pack(rows: Sequence[Row], block_size: int, device: torch.device) -> Batch:
    """One row of tokens, in the order of `rows`. The rows must have passed `check_plan`."""
    spans = _spans(rows)
    tokens = np.concatenate([np.asarray(row.tokens, dtype=np.int64) for row in rows])
    positions = np.concatenate([np.arange(s.start, s.length, dtype=np.int64) for s in spans])
    places = np.concatenate([_places(span, block_size) for span in spans])
    drawn = [s.offset + s.count - 1 for s, row in zip(spans, rows, strict=True) if row.draw is not None]
    on_device = upload(device, tokens, positions, places, drawn)
    return Batch(on_device[0].unsqueeze(0), on_device[1].unsqueeze(0), on_device[2], on_device[3], spans)


def _spans(rows: Sequence[Row]) -> tuple[Span, ...]:
    spans, offset = [], 0
    for row in rows:
        spans.append(Span(offset, row.count, row.start, row.blocks, row.slot))
        offset += row.count
    return tuple(spans)


def _places(span: Span, block_size: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    first = span.start // block_size
    blocks = np.asarray(span.blocks[first : -(-span.length // block_size)], dtype=np.int64)
    positions = np.arange(span.start, span.length, dtype=np.int64)
    return blocks[positions // block_size - first] * block_size + positions % block_size
