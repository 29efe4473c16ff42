"""The words of one operation whose receiver copies by itself, with a pool that the test holds."""

import numpy as np
import pytest

from handoff.transports import shared_copy
from handoff.transports.base import PeerLost, Piece, TransferError
from handoff.transports.shared_copy import Numbers, copy_mapped
from handoff.transports.ucx_offer import OfferPart, parts_of
from handoff.transports.ucx_shared import TURN_OPERATIONS, SharedLane
from handoff.transports.ucx_wire import Note, Tell

SIZE = 1 << 16
NUMBER = 77


class Source:
    """The peer's pool, as `PeerPool` shows it. failing: what a copy raises. lasts: copies until the peer gives up."""

    def __init__(self) -> None:
        self.bytes = np.random.default_rng(3).integers(0, 256, SIZE, np.uint8)
        self.base, self.size = self.bytes.ctypes.data, SIZE
        self.failing: OSError | None = None
        self.lasts = 1000
        self.closed = 0

    def copy(self, targets: Numbers, sources: Numbers, lengths: Numbers) -> None:
        if self.failing:
            raise self.failing
        self.lasts -= 1
        copy_mapped(targets, sources, lengths)

    def stands(self, number: int) -> bool:
        assert number == NUMBER
        return self.lasts > 0

    def close(self) -> None:
        self.closed += 1


class Receiver:
    def __init__(self) -> None:
        self.source = Source()
        self.pool = np.zeros(SIZE, np.uint8)
        self.lane = SharedLane(5, self.source, self.pool)  # type: ignore[arg-type]
        self.told: list[Note] = []
        self.outcomes: list[TransferError | None] = []

    def post(self, channel: int, pieces: list[Piece]) -> None:
        self.lane.post_receive(channel, pieces, self.outcomes.append)

    def offer(self, channel: int, *pieces: tuple[int, int]) -> None:
        offsets, lengths = np.array(pieces, np.int64).T
        for part in parts_of(channel, NUMBER, offsets, lengths):
            self.lane.take_offer(part.pack())

    def turn(self) -> bool:
        changed = self.lane.copy(self.told.append)
        for operation in self.lane.take_ended():
            operation.finish()
        return changed


@pytest.fixture
def receiver() -> Receiver:
    return Receiver()


@pytest.mark.parametrize("first", ["offer", "post"])
def test_it_copies_when_it_has_both_and_says_so(receiver: Receiver, first: str) -> None:
    steps = [lambda: receiver.offer(1, (100, 50), (7, 3)), lambda: receiver.post(1, [Piece(0, 50), Piece(60, 3)])]
    for step in steps if first == "offer" else reversed(steps):
        assert not receiver.turn()
        step()
    assert receiver.turn()
    assert receiver.outcomes == [None]
    assert receiver.told == [Note(Tell.TAKEN, 1)]
    assert (receiver.pool[:50] == receiver.source.bytes[100:150]).all()
    assert (receiver.pool[60:63] == receiver.source.bytes[7:10]).all()
    assert not receiver.lane.busy


@pytest.mark.parametrize(
    "offered", [[(0, 11)], [(0, 10), (20, 10)], [(-1, 10)], [(SIZE - 9, 10)], [(2**63 - 5, 10)], [(-(2**63), 10)]]
)
def test_an_offer_that_does_not_fit_is_refused(receiver: Receiver, offered: list[tuple[int, int]]) -> None:
    receiver.post(1, [Piece(0, 10)])
    receiver.offer(1, *offered)
    receiver.turn()
    assert receiver.told == [Note(Tell.REFUSED, 1)]
    assert type(receiver.outcomes[0]) is TransferError
    assert not receiver.pool.any()
    receiver.post(1, [Piece(0, 10)])
    receiver.offer(1, (5, 10))
    receiver.turn()
    assert receiver.outcomes[1:] == [None]


def test_a_sender_that_gives_up_during_the_copy_is_noticed(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_copy, "SLICE_BYTES", 100)
    receiver.source.lasts = 4
    receiver.post(1, [Piece(0, 400)])
    receiver.offer(1, (0, 400))
    while not receiver.lane.given_up:
        assert receiver.turn()
    assert receiver.outcomes == []
    assert receiver.told == []
    for operation in receiver.lane.abandon(PeerLost("it has given up")):
        operation.finish()
    assert [type(outcome) for outcome in receiver.outcomes] == [PeerLost]


def test_a_pool_that_can_not_be_read_any_more(receiver: Receiver) -> None:
    receiver.source.failing = ProcessLookupError("no such process")
    receiver.post(1, [Piece(0, 400)])
    receiver.offer(1, (0, 400))
    receiver.turn()
    assert receiver.lane.given_up
    assert (receiver.outcomes, receiver.told) == ([], [])


def test_operations_take_turns(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_copy, "SLICE_BYTES", 100)
    receiver.post(1, [Piece(0, 10_000)])
    receiver.offer(1, (0, 10_000))
    receiver.turn()
    receiver.post(2, [Piece(20_000, 150)])
    receiver.offer(2, (0, 150))
    while not receiver.told:
        receiver.turn()
    assert receiver.told == [Note(Tell.TAKEN, 2)]
    assert np.count_nonzero(receiver.pool[:20_000]) <= 400


def test_short_operations_share_a_turn(receiver: Receiver) -> None:
    for channel in range(40):
        receiver.post(channel, [Piece(channel * 10, 10)])
        receiver.offer(channel, (channel * 10, 10))
    receiver.turn()
    assert len(receiver.told) == TURN_OPERATIONS
    receiver.turn()
    receiver.turn()
    assert receiver.outcomes == [None] * 40


def test_abandoning_ends_everything_once_and_lets_go_of_the_pool(receiver: Receiver) -> None:
    receiver.post(1, [Piece(0, 10)])
    receiver.post(2, [Piece(0, 10)])
    receiver.offer(2, (0, 10))
    receiver.offer(3, (0, 10))
    for channel in (1, 2):
        receiver.lane.post_send(channel, [Piece(0, 10)], receiver.outcomes.append)
    assert receiver.lane.offer(lambda frame: None)
    receiver.lane.post_send(4, [Piece(0, 10)], receiver.outcomes.append)
    for operation in (*receiver.lane.abandon(PeerLost("gone")), *receiver.lane.abandon(PeerLost("gone"))):
        operation.finish()
    assert [type(outcome) for outcome in receiver.outcomes] == [PeerLost] * 5
    assert receiver.source.closed == 1
    assert not receiver.lane.busy
    assert not receiver.pool.any()


def test_a_sender_offers_once_and_ends_with_the_answer() -> None:
    lane = SharedLane(5, None, np.zeros(100, np.uint8))
    frames: list[bytes] = []
    outcomes: list[TransferError | None] = []
    lane.post_send(1, [Piece(3, 4)], outcomes.append)
    lane.post_send(1, [Piece(5, 6)], outcomes.append)
    assert lane.offer(frames.append)
    assert not lane.offer(frames.append)
    parts = [OfferPart.unpack(frame) for frame in frames]
    assert [(part.number, part.offsets.tolist(), part.lengths.tolist()) for part in parts] == [
        (5, [3], [4]),
        (5, [5], [6]),
    ]
    refused = TransferError("it does not fit")
    lane.take_answer(9, None)
    lane.take_answer(1, refused)
    lane.take_answer(1, None)
    for operation in lane.take_ended():
        operation.finish()
    assert outcomes == [refused, None]
    assert not lane.busy
