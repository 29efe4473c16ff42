"""Windows, credits and ends of one operation, with requests that the test completes."""

import random
from collections.abc import Callable

import pytest
from ucxx._lib.libucxx import UCXError

from handoff.transports import ucx_transfer
from handoff.transports.base import PeerLost, Piece, TransferError
from handoff.transports.ucx_transfer import (
    CREDIT_BYTES,
    CREDIT_NOTES,
    CREDIT_PIECES,
    MAX_PIECE_BYTES,
    WINDOW_BYTES,
    WINDOW_PIECES,
    Receive,
    Send,
    Transfer,
    cut,
)

MIB = 1 << 20


class Request:
    def __init__(self, piece: Piece) -> None:
        self.piece = piece
        self.completed = False
        self.failed = False

    def check_error(self) -> None:
        if self.failed:
            raise UCXError("it failed")


class Wire:
    """What UCX holds of one operation, and what its callback got."""

    def __init__(self, kind: type[Transfer], pieces: list[Piece]) -> None:
        self.held: list[Request] = []
        self.posted: list[Piece] = []
        self.outcomes: list[TransferError | None] = []
        self.transfer = kind(1, pieces, self._post, self.outcomes.append)

    def _post(self, piece: Piece) -> Request:
        self.posted.append(piece)
        self.held.append(Request(piece))
        return self.held[-1]

    @property
    def held_bytes(self) -> int:
        return sum(request.piece.length for request in self.held)

    def complete(self, count: int) -> None:
        for request in self.held[:count]:
            request.completed = True
        del self.held[:count]
        self.transfer.advance()


def same(count: int, length: int) -> list[Piece]:
    return [Piece(index * length, length) for index in range(count)]


@pytest.mark.parametrize("seed", range(10))
def test_cutting_depends_on_lengths_only_and_keeps_every_byte(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [
        rng.choice([1, MAX_PIECE_BYTES - 1, MAX_PIECE_BYTES, MAX_PIECE_BYTES + 1, 5 * MIB + 3]) for _ in range(9)
    ]
    sides = [[Piece(rng.randrange(10**9), length) for length in lengths] for _ in range(2)]
    left, right = (list(cut(pieces)) for pieces in sides)
    assert [piece.length for piece in left] == [piece.length for piece in right]
    assert max(piece.length for piece in left) <= MAX_PIECE_BYTES
    for pieces, whole in zip((left, right), sides, strict=True):
        joined: list[Piece] = []
        for piece in pieces:
            last = joined[-1] if joined else None
            if last and last.offset + last.length == piece.offset and last.length % MAX_PIECE_BYTES == 0:
                joined[-1] = Piece(last.offset, last.length + piece.length)
            else:
                joined.append(piece)
        assert joined == whole


@pytest.mark.parametrize("kind", [Send, Receive])
def test_ucx_holds_a_window_of_bytes(kind: type[Transfer]) -> None:
    wire = Wire(kind, [Piece(0, 2 << 30)])
    wire.transfer.advance()
    assert wire.held_bytes == WINDOW_BYTES
    wire.complete(3)
    assert wire.held_bytes == WINDOW_BYTES
    assert sum(piece.length for piece in wire.posted) == WINDOW_BYTES + 3 * MAX_PIECE_BYTES


@pytest.mark.parametrize("kind", [Send, Receive])
def test_ucx_holds_a_window_of_pieces(kind: type[Transfer]) -> None:
    wire = Wire(kind, same(100_000, 100))
    wire.transfer.advance()
    assert len(wire.held) == WINDOW_PIECES
    wire.complete(7)
    assert len(wire.held) == WINDOW_PIECES


@pytest.mark.parametrize(("length", "most"), [(100, CREDIT_PIECES), (MIB, CREDIT_BYTES // MIB)])
def test_a_sender_waits_for_credit_when_its_pieces_leave_at_once(length: int, most: int) -> None:
    wire = Wire(Send, same(100_000, length))
    for _ in range(100):
        wire.complete(len(wire.held))
    assert len(wire.posted) == most
    assert isinstance(wire.transfer, Send)
    wire.transfer.credit(10)
    for _ in range(100):
        wire.complete(len(wire.held))
    assert len(wire.posted) == most + 10


def test_a_credit_of_an_earlier_operation_does_no_harm() -> None:
    wire = Wire(Send, same(3, 100))
    assert isinstance(wire.transfer, Send)
    wire.transfer.credit(5000)
    wire.complete(0)
    wire.transfer.credit(2)
    wire.complete(3)
    assert wire.transfer.ended


@pytest.mark.parametrize("seed", range(20))
def test_a_sender_never_stalls_for_good_and_is_never_too_far_ahead(seed: int) -> None:
    rng = random.Random(seed)
    longest = rng.choice([300, 20_000, 3 * MIB])
    pieces = [Piece(0, rng.randint(1, longest)) for _ in range(12_000 if longest < MIB else 200)]
    left, right = Wire(Send, pieces), Wire(Receive, pieces)
    assert isinstance(left.transfer, Send)
    assert isinstance(right.transfer, Receive)
    arrived = 0
    for _ in range(20_000):
        left.complete(rng.randint(0, len(left.held)))  # They leave at once, as short ones do.
        arrived = len(left.posted)
        ready = min(arrived - right.transfer.landed, len(right.held))
        right.complete(rng.randint(0, max(ready, 0)))
        assert arrived - right.transfer.landed <= CREDIT_PIECES
        if right.transfer.credit_due():
            left.transfer.credit(right.transfer.landed)
        if left.transfer.ended and right.transfer.quiet:
            break
    assert left.transfer.ended
    assert right.transfer.quiet


def test_what_has_landed_is_told_a_few_times_per_credit() -> None:
    wire, told = Wire(Receive, same(3 * CREDIT_PIECES, 10)), 0
    assert isinstance(wire.transfer, Receive)
    while not wire.transfer.quiet:
        wire.complete(64)
        told += wire.transfer.credit_due()
    assert told == 3 * CREDIT_NOTES - 1


def received(count: int = 3) -> tuple[Wire, Receive]:
    wire = Wire(Receive, same(count, 100))
    assert isinstance(wire.transfer, Receive)
    wire.transfer.advance()
    return wire, wire.transfer


def test_a_receive_succeeds_only_with_the_senders_word() -> None:
    wire, receive = received()
    wire.complete(3)
    assert receive.quiet
    assert not receive.ended
    receive.confirm(None)
    assert receive.ended
    receive.finish()
    assert wire.outcomes == [None]


def test_the_word_may_come_before_the_pieces() -> None:
    wire, receive = received()
    receive.confirm(None)
    assert not receive.ended
    wire.complete(3)
    assert receive.ended


def test_a_sender_that_failed_fails_the_receive() -> None:
    wire, receive = received()
    wire.complete(3)
    receive.confirm(TransferError("it could not"))
    receive.finish()
    assert str(wire.outcomes[0]) == "it could not"


def fail_one(wire: Wire) -> None:
    wire.held[0].failed = True
    wire.complete(1)


def abandon(wire: Wire) -> None:
    wire.transfer.abandon(PeerLost("gone"))


@pytest.mark.parametrize("end", [fail_one, abandon])
@pytest.mark.parametrize("kind", [Send, Receive])
def test_a_broken_operation_posts_no_more_and_ends_when_ucx_lets_go(
    kind: type[Transfer], end: Callable[[Wire], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ucx_transfer, "WINDOW_PIECES", 4)
    wire = Wire(kind, same(10, 100))
    wire.transfer.advance()
    end(wire)
    posted = len(wire.posted)
    assert not wire.transfer.ended
    while wire.held:
        wire.complete(1)
    assert len(wire.posted) == posted
    assert wire.transfer.ended
    assert wire.transfer.error is not None
