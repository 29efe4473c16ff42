"""From block tables to pieces: neighbours that are neighbours on both sides travel as one message.

Blocks are paired first and looked at in the order of the source's pool, so it doesn't matter where in the two tables
they stand: a pool hands out the blocks of the last sequence from its end to its beginning.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from handoff.transports.base import Piece

MAX_PIECE_BYTES = 8 << 20
"""Bounds how long one message occupies a lane."""


Part: TypeAlias = tuple[int, int]
"""(start, length) in each block, in bytes."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of neighbouring blocks, by their first block on either side and their lengths, all in bytes."""

    sources: list[int]
    destinations: list[int]
    lengths: list[int]

    @property
    def sends(self) -> list[Piece]:
        """What the source posts: equal to `receives` in number and lengths."""
        return [Piece(offset, length) for offset, length in zip(self.sources, self.lengths, strict=True)]

    @property
    def receives(self) -> list[Piece]:
        """What the destination posts."""
        return [Piece(offset, length) for offset, length in zip(self.destinations, self.lengths, strict=True)]


def coalesce(source: Sequence[int], destination: Sequence[int], block_bytes: int, part: Part | None = None) -> Runs:
    """Pair the i-th source block with the i-th destination block.

    Both sides compute this from the same two tables, so they agree without another message. part: what travels of each
    block, None for whole ones; parts of blocks are never neighbours. Raises ValueError when the tables are of different
    lengths.
    """
    if len(source) != len(destination):
        raise ValueError(f"{len(source)} source blocks can't fill {len(destination)} destination blocks")
    if part is not None:
        start, length = part
        sends, receives = ([block * block_bytes + start for block in blocks] for blocks in (source, destination))
        return Runs(sends, receives, [length] * len(source))
    sources, destinations = np.asarray(source, np.int64), np.asarray(destination, np.int64)
    order = np.argsort(sources)
    sources, destinations = sources[order], destinations[order]
    starts = _run_starts(sources, destinations, max(1, MAX_PIECE_BYTES // block_bytes))
    counts = np.diff(starts, append=len(sources))
    return Runs(
        (sources[starts] * block_bytes).tolist(),
        (destinations[starts] * block_bytes).tolist(),
        (counts * block_bytes).tolist(),
    )


def _run_starts(
    sources: "np.ndarray[tuple[int], np.dtype[np.int64]]",
    destinations: "np.ndarray[tuple[int], np.dtype[np.int64]]",
    longest: int,
) -> "np.ndarray[tuple[int], np.dtype[np.intp]]":
    """Where runs of at most `longest` blocks begin."""
    places = np.arange(len(sources))
    breaks = np.ones(len(sources), np.bool_)
    breaks[1:] = (np.diff(sources) != 1) | (np.diff(destinations) != 1)
    place_in_run = places - np.maximum.accumulate(np.where(breaks, places, 0))
    return np.flatnonzero(place_in_run % longest == 0)
