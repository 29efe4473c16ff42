"""From block tables to pieces: neighbours that are neighbours on both sides travel as one message."""

from collections.abc import Sequence

from handoff.transports.base import Piece

MAX_PIECE_BYTES = 8 << 20
"""Bounds how long one message occupies a lane."""


def coalesce(source: Sequence[int], destination: Sequence[int], block_bytes: int) -> tuple[list[Piece], list[Piece]]:
    """Pair the i-th source block with the i-th destination block; the two lists have equal lengths, piece by piece.

    Both sides compute this from the same two tables, so they agree without another message.
    """
    if len(source) != len(destination):
        raise ValueError(f"{len(source)} source blocks can't fill {len(destination)} destination blocks")
    longest = max(1, MAX_PIECE_BYTES // block_bytes)
    sends: list[Piece] = []
    receives: list[Piece] = []
    start = 0
    for end in range(1, len(source) + 1):
        if end < len(source) and end - start < longest and _is_next(source, end) and _is_next(destination, end):
            continue
        length = (end - start) * block_bytes
        sends.append(Piece(source[start] * block_bytes, length))
        receives.append(Piece(destination[start] * block_bytes, length))
        start = end
    return sends, receives


def _is_next(blocks: Sequence[int], index: int) -> bool:
    return blocks[index] == blocks[index - 1] + 1
