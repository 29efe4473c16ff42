from dataclasses import replace

from handoff.pieces import MAX_PIECE_BYTES
from handoff.relayout.pieces import pieces_of_pool, pieces_of_staging
from handoff.relayout.routes import routes
from handoff.relayout.shape import KvShape
from handoff.transports.base import Piece

ONE = KvShape(layers=30, kv_heads=4, head_dim=64, block_size=16, dtype="bf16")


def test_neighbours_in_the_pool_travel_as_one_piece_into_the_staging_area() -> None:
    route = routes(ONE, replace(ONE, block_size=32))[0, 0]
    size = route.staged_block_bytes
    assert size == ONE.block_bytes
    assert pieces_of_pool(route, [7, 8, 3], staging=4096) == (
        [Piece(3 * size, size), Piece(7 * size, 2 * size)],
        [Piece(4096 + 2 * size, size), Piece(4096, 2 * size)],
    )


def test_packed_blocks_travel_as_pieces_of_a_bounded_size() -> None:
    route = routes(ONE, replace(ONE, ranks=2))[0, 1]
    total = 50 * route.staged_block_bytes
    pieces = pieces_of_staging(route, 50, staging=64)
    assert pieces == [Piece(64, MAX_PIECE_BYTES), Piece(64 + MAX_PIECE_BYTES, total - MAX_PIECE_BYTES)]


def test_one_packed_block_is_one_piece() -> None:
    route = routes(ONE, replace(ONE, ranks=4))[0, 3]
    assert pieces_of_staging(route, 1, staging=0) == [Piece(0, ONE.block_bytes // 4)]
