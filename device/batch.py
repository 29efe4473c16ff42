"""A step's rows packed into one row of tokens, on the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from device.upload import upload
from scheduler.contract import Row
from scheduler.effects import NO_SLOT

Ints: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"


@dataclass(slots=True)  # a frozen one takes several times as long to make, at every step for every sequence
class Span:
    """One row's share of the packed tokens. Never changed.

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
    tokens: list[int] = []
    for row in rows:
        tokens += row.tokens
    positions, places = _positions_and_places(spans, block_size)
    drawn = [s.offset + s.count - 1 for s, row in zip(spans, rows, strict=True) if row.draw is not None]
    on_device = upload(device, tokens, positions, places, drawn)
    return Batch(on_device[0].unsqueeze(0), on_device[1].unsqueeze(0), on_device[2], on_device[3], spans)


def _spans(rows: Sequence[Row]) -> tuple[Span, ...]:
    spans, offset = [], 0
    for row in rows:
        count = row.count
        spans.append(Span(offset, count, row.start, row.blocks, row.slot))
        offset += count
    return tuple(spans)


def _positions_and_places(spans: Sequence[Span], block_size: int) -> tuple[Ints, Ints]:
    """Of all tokens, without a step of Python for each: `written` are the blocks that the spans write, end to end."""
    written: list[int] = []
    shifts = []  # from a block's number in its sequence to its place in `written`
    for span in spans:
        first = span.start // block_size
        shifts.append(len(written) - first)
        written += span.blocks[first : -(-span.length // block_size)]
    counts = [span.count for span in spans]
    total = spans[-1].offset + spans[-1].count
    positions = np.arange(total) + np.repeat([span.start - span.offset for span in spans], counts)
    blocks, offsets = np.divmod(positions, block_size)
    return positions, np.asarray(written)[blocks + np.repeat(shifts, counts)] * block_size + offsets
