import random

import pytest

from handoff.pieces import MAX_PIECE_BYTES, coalesce
from handoff.transports.base import Piece


def test_neighbours_on_both_sides_travel_together() -> None:
    sends, receives = coalesce([4, 5, 6], [0, 1, 2], 10)
    assert (sends, receives) == ([Piece(40, 30)], [Piece(0, 30)])


@pytest.mark.parametrize(
    ("source", "destination"),
    [([0, 1, 2], [5, 6, 9]), ([0, 1, 7], [5, 6, 7])],
    ids=["gap at the destination", "gap at the source"],
)
def test_a_gap_on_either_side_splits(source: list[int], destination: list[int]) -> None:
    sends, receives = coalesce(source, destination, 10)
    assert [piece.length for piece in sends] == [piece.length for piece in receives] == [20, 10]


def test_descending_blocks_are_no_neighbours() -> None:
    assert len(coalesce([2, 1, 0], [2, 1, 0], 10)[0]) == 3


def test_nothing_to_move_is_no_piece() -> None:
    assert coalesce([], [], 10) == ([], [])


def test_pieces_are_bounded_but_hold_a_block_at_least() -> None:
    third = MAX_PIECE_BYTES // 3
    assert [p.length // third for p in coalesce(range(8), range(8), third)[0]] == [3, 3, 2]
    assert len(coalesce(range(3), range(3), MAX_PIECE_BYTES + 1)[0]) == 3


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
    sends, receives = coalesce(source, destination, size)
    for send, receive in zip(sends, receives, strict=True):
        assert send.length == receive.length <= max(size, MAX_PIECE_BYTES)
        for offset in range(0, send.length, size):
            moved[(send.offset + offset) // size] = (receive.offset + offset) // size
    assert moved == dict(zip(source, destination, strict=True))
