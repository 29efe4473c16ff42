"""Which source blocks fill which destination blocks, window by window, and within a window cut by cut."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """What the staging area holds at a time.

    blocks: indices in the source's block table. tokens: what is taken out of them, as positions in the sequence.
    into: indices in the destination's block table.
    """

    blocks: range
    tokens: range
    into: range


@dataclass(frozen=True, slots=True)
class Cut:
    """Runs of `length` tokens that lie alike: from source_offset in staged blocks to destination_offset in blocks.

    staged: which blocks of the staging area, equally far from each other. into: for each its index in the
    destination's block table.
    """

    source_offset: int
    destination_offset: int
    length: int
    staged: slice
    into: tuple[int, ...]


def windows(source_block_size: int, destination_block_size: int, tokens: range, staged_blocks: int) -> list[Window]:
    """Cover `tokens` with as few windows of at most `staged_blocks` source blocks as possible, in order.

    tokens: range(what the destination has cached already, end of what the source has), or any part of it.
    Raises ValueError for an area without room for a block.
    """
    if staged_blocks < 1:
        raise ValueError(f"a staging area of {staged_blocks} blocks holds nothing")
    if not tokens:
        return []
    end = _blocks_for(tokens.stop, source_block_size)
    found = []
    for first in range(tokens.start // source_block_size, end, staged_blocks):
        blocks = range(first, min(first + staged_blocks, end))
        start = max(tokens.start, blocks.start * source_block_size)
        stop = min(tokens.stop, blocks.stop * source_block_size)
        into = range(start // destination_block_size, _blocks_for(stop, destination_block_size))
        found.append(Window(blocks, range(start, stop), into))
    return found


def cuts(window: Window, source_block_size: int, destination_block_size: int) -> list[Cut]:
    """Cut a window's tokens where a block ends on either side, and gather the runs that lie alike.

    At most one cut per run; for windows of many blocks, source_block_size + destination_block_size divided by their
    greatest common divisor, and two at the ends.
    """
    alike: dict[tuple[int, int, int], tuple[list[int], list[int]]] = {}
    start = window.tokens.start
    while start < window.tokens.stop:
        block, source_offset = divmod(start, source_block_size)
        into, destination_offset = divmod(start, destination_block_size)
        left = source_block_size - source_offset, destination_block_size - destination_offset
        length = min(*left, window.tokens.stop - start)
        staged, targets = alike.setdefault((source_offset, destination_offset, length), ([], []))
        staged.append(block - window.blocks.start)
        targets.append(into)
        start += length
    return [Cut(*key, _as_slice(staged), tuple(into)) for key, (staged, into) in alike.items()]


def _as_slice(indices: Sequence[int]) -> slice:
    """Runs that lie alike come back every least common multiple of the block sizes, so their blocks do too."""
    step = indices[1] - indices[0] if len(indices) > 1 else 1
    return slice(indices[0], indices[-1] + 1, step)


def _blocks_for(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)
