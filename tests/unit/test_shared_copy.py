"""Slices of one operation's copy, over both ways."""

import os

import numpy as np
import numpy.typing as npt
import pytest

from handoff.transports import shared_copy
from handoff.transports.shared_copy import Copy, Numbers, PieceCopy, copy_from, copy_mapped, cut_long

Bytes = npt.NDArray[np.uint8]
SIZE = 1 << 20


def numbers(*values: int) -> Numbers:
    return np.array(values, np.int64)


@pytest.fixture(params=["mapped", "kernel"])
def copy(request: pytest.FixtureRequest) -> Copy:
    return copy_mapped if request.param == "mapped" else copy_from(os.getpid())


def pools() -> tuple[Bytes, Bytes]:
    return np.random.default_rng(1).integers(0, 256, SIZE, np.uint8), np.zeros(SIZE, np.uint8)


@pytest.mark.parametrize("slice_bytes", [1, 1000, 4096, SIZE])
def test_every_piece_arrives_and_nothing_else(copy: Copy, slice_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_copy, "SLICE_BYTES", slice_bytes)
    monkeypatch.setattr(shared_copy, "LOCKED_BYTES", 500)
    source, target = pools()
    lengths, theirs, ours = numbers(1, 4096, 999, 1000, 5), numbers(5000, 0, 9000, 7000, 4500), numbers(9, 100, 1, 7, 0)
    ours = ours + numbers(0, 0, 10_000, 20_000, 30_000)
    expected = np.zeros_like(target)
    for to, start, length in zip(ours, theirs, lengths, strict=True):
        expected[to : to + length] = source[start : start + length]
    operation = PieceCopy(target.ctypes.data + ours, source.ctypes.data + theirs, lengths)
    while not operation.ended:
        operation.advance(copy)
    assert (target == expected).all()


def test_a_slice_is_bounded_in_bytes_and_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_copy, "SLICE_BYTES", 1000)
    monkeypatch.setattr(shared_copy, "SLICE_PIECES", 20)
    slices: list[list[int]] = []
    lengths = numbers(2500, 400, 400, 400, *[10] * 50)
    operation = PieceCopy(lengths * 0, lengths * 0, lengths)
    while not operation.ended:
        operation.advance(lambda targets, sources, lengths: slices.append(lengths.tolist()))
    assert slices[:4] == [[1000], [1000], [500, 400], [400, 400, *[10] * 18]]
    assert [len(piece) for piece in slices[4:]] == [20, 12]
    assert sum(map(sum, slices)) == lengths.sum()


def test_long_pieces_are_cut_alike_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_copy, "SLICE_BYTES", 100)
    targets, sources, lengths = cut_long(numbers(0, 1000), numbers(5000, 9000), numbers(250, 100))
    assert targets.tolist() == [0, 100, 200, 1000]
    assert sources.tolist() == [5000, 5100, 5200, 9000]
    assert lengths.tolist() == [100, 100, 50, 100]


def test_memory_that_is_not_there_is_an_error() -> None:
    _, target = pools()
    with pytest.raises(OSError, match="could not be read"):
        copy_from(os.getpid())(numbers(target.ctypes.data), numbers(64), numbers(10))
