"""The pieces of one window that the two transports post; both sides compute the same lengths."""

from collections.abc import Sequence
from dataclasses import replace

from handoff.pieces import MAX_PIECE_BYTES, coalesce
from handoff.relayout.routes import Route
from handoff.transports.base import Piece


def pieces_of_pool(route: Route, blocks: Sequence[int], staging: int) -> tuple[list[Piece], list[Piece]]:
    """(sends, receives) of a whole route: from the source's pool into the destination's staging area.

    blocks: ids at the source, of one window. staging: where the area begins in the destination's registered memory.
    """
    runs = coalesce(blocks, range(len(blocks)), route.staged_block_bytes)
    return runs.sends, [replace(piece, offset=piece.offset + staging) for piece in runs.receives]


def pieces_of_staging(route: Route, blocks: int, staging: int) -> list[Piece]:
    """`blocks` packed blocks in an area that begins at byte `staging`: what either side of a packed route posts."""
    total = blocks * route.staged_block_bytes
    return [Piece(staging + start, min(MAX_PIECE_BYTES, total - start)) for start in range(0, total, MAX_PIECE_BYTES)]
