import random

import pytest

from handoff.pieces import MAX_PIECE_BYTES, coalesce
from handoff.transports.base import Piece


def test_neighbours_on_both_sides_travel_together() -> None:
    runs = coalesce([4, 5, 6], [0, 1, 2], 10)
    assert (runs.sends, runs.receives) == ([Piece(40, 30)], [Piece(0, 30)])


@pytest.mark.parametrize(
    ("source", "destination"),
    [([0, 1, 2], [5, 6, 9]), ([0, 1, 7], [5, 6, 7])],
    ids=["gap at the destination", "gap at the source"],
)
def test_a_gap_on_either_side_splits(source: list[int], destination: list[int]) -> None:
    runs = coalesce(source, destination, 10)
    assert [piece.length for piece in runs.sends] == [piece.length for piece in runs.receives] == [20, 10]


@pytest.mark.parametrize(
    ("source", "destination"),
    [([6, 5, 4], [2, 1, 0]), ([5, 4, 6], [1, 0, 2])],
    ids=["from the end to the beginning", "in any order"],
)
def test_neighbours_need_not_stand_side_by_side_in_the_tables(source: list[int], destination: list[int]) -> None:
    runs = coalesce(source, destination, 10)
    assert (runs.sends, runs.receives) == ([Piece(40, 30)], [Piece(0, 30)])


def test_blocks_that_go_opposite_ways_are_no_neighbours() -> None:
    assert len(coalesce([0, 1, 2], [2, 1, 0], 10).sends) == 3


def test_parts_of_neighbours_travel_alone() -> None:
    runs = coalesce([4, 5], [0, 1], 10, (3, 2))
    assert (runs.sends, runs.receives) == ([Piece(43, 2), Piece(53, 2)], [Piece(3, 2), Piece(13, 2)])


def test_nothing_to_move_is_no_piece() -> None:
    assert coalesce([], [], 10).sends == coalesce([], [], 10).receives == []


def test_pieces_are_bounded_but_hold_a_block_at_least() -> None:
    third = MAX_PIECE_BYTES // 3
    assert [p.length // third for p in coalesce(range(8), range(8), third).sends] == [3, 3, 2]
    assert len(coalesce(range(3), range(3), MAX_PIECE_BYTES + 1).sends) == 3


def test_tables_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="2 source blocks can't fill 1"):
        coalesce([0, 1], [0], 10)


@pytest.mark.parametrize("seed", range(30))
def test_every_block_lands_where_its_partner_is(seed: int) -> None:
    rng = random.Random(seed)
    count, size = rng.randint(0, 40), rng.choice([1, 8, MAX_PIECE_BYTES // 5])
    source = rng.sample(range(count + 10), count) if seed % 2 else list(range(3, 3 + count))
    destination = sorted(rng.sample(range(count + 10), count))
    moved = {}
    runs = coalesce(source, destination, size)
    for send, receive in zip(runs.sends, runs.receives, strict=True):
        assert send.length == receive.length <= max(size, MAX_PIECE_BYTES)
        for offset in range(0, send.length, size):
            moved[(send.offset + offset) // size] = (receive.offset + offset) // size
    assert moved == dict(zip(source, destination, strict=True))
