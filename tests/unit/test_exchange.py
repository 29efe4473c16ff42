from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from kv_machine import KvMachine

from handoff.compatibility import Compatibility, IncompatiblePeer
from handoff.exchange import Broken, Exchange, Landed, PeerInfo, Sent, TransferEnd
from handoff.pool_layout import PoolLayout
from handoff.transports.base import Done, Link, OnMessage, PeerLost, Piece, TransferError
from handoff.wire import Accept, Message, Offer, Refuse, decode, encode
from scheduler.decode_scheduler import ReservedKv
from scheduler.ids import BlockId, HandoffId, NodeId, RequestId
from scheduler.prefill_scheduler import HeldKv

P, D = NodeId("prefill-0"), NodeId("decode-0")
H = HandoffId("h")
BLOCK_BYTES = 32
LAYOUT = PoolLayout(BLOCK_BYTES)
COMPATIBILITY = Compatibility.of(KvMachine(4, 4).facts(), protocol=1)


class ManualTransport:
    """A `Transport` that does nothing by itself: tests deliver its frames and end its operations."""

    name = "manual"
    address = b"manual"

    def __init__(self) -> None:
        self.frames: deque[tuple[str, bytes]] = deque()
        self.sends: list[tuple[str, int, list[Piece], Done]] = []
        self.receives: list[tuple[str, int, list[Piece], Done]] = []
        self.connected: list[str] = []

    def start(self, node: str, pool: Any, on_message: OnMessage) -> None:
        self.on_message = on_message

    def connect(self, peer: str, address: bytes) -> None:
        self.connected.append(peer)

    def disconnect(self, peer: str) -> None:
        """Ends what is posted, as the contract says."""
        self.connected.remove(peer)
        for posted in (self.sends, self.receives):
            for operation in [o for o in posted if o[0] == peer]:
                posted.remove(operation)
                operation[3](PeerLost(f"{peer} was disconnected"))

    def send_message(self, peer: str, frame: bytes) -> None:
        self.frames.append((peer, frame))

    def post_send(self, peer: str, channel: int, pieces: Sequence[Piece], done: Done) -> None:
        self.sends.append((peer, channel, list(pieces), done))

    def post_receive(self, peer: str, channel: int, pieces: Sequence[Piece], done: Done) -> None:
        self.receives.append((peer, channel, list(pieces), done))

    def links(self) -> list[Link]:
        return [Link(peer, "manual") for peer in self.connected]

    def close(self) -> None:
        for peer in list(self.connected):
            self.disconnect(peer)


class Side:
    """One node's exchange, its transport and what it reported."""

    def __init__(self, node: NodeId, incarnation: int = 1) -> None:
        self.transport = ManualTransport()
        self.ends: list[TransferEnd] = []
        self.now = 10.0
        self.exchange = Exchange(
            node, incarnation, self.transport, COMPATIBILITY, LAYOUT, self.ends.append, lambda: self.now
        )
        self.exchange.start(None)


class Pair:
    def __init__(self) -> None:
        self.source, self.destination = Side(P), Side(D)
        self.source.exchange.connect(self.destination.exchange.info)
        self.destination.exchange.connect(self.source.exchange.info)

    def deliver(self) -> list[Message]:
        """Deliver all frames; returns them."""
        delivered = []
        while self.source.transport.frames or self.destination.transport.frames:
            for origin, name, target in ((self.source, P, self.destination), (self.destination, D, self.source)):
                while origin.transport.frames:
                    _, frame = origin.transport.frames.popleft()
                    delivered.append(decode(frame))
                    target.transport.on_message(name, frame)
        return delivered

    def move(self, error: TransferError | None = None) -> None:
        """End the posted send and receive."""
        for transport in (self.destination.transport, self.source.transport):
            for posted in (transport.receives, transport.sends):
                while posted:
                    posted.pop(0)[3](error)

    @property
    def ends(self) -> tuple[list[TransferEnd], list[TransferEnd]]:
        return self.source.ends, self.destination.ends


def held(*blocks: int, prompt_tokens: int = 10) -> HeldKv:
    return HeldKv(RequestId("r"), prompt_tokens, 42, tuple(BlockId(block) for block in blocks))


def reserved(*blocks: int, cached: int = 0, prompt_tokens: int = 10) -> ReservedKv:
    return ReservedKv(RequestId("r"), prompt_tokens, tuple(BlockId(block) for block in blocks), cached)


@pytest.fixture
def pair() -> Pair:
    return Pair()


def reasons(ends: list[TransferEnd]) -> list[str]:
    return [end.reason for end in ends if isinstance(end, Broken)]


def test_blocks_land_and_both_sides_report_it_once(pair: Pair) -> None:
    pair.destination.exchange.expect(H, 1, reserved(0, 1, 5))
    pair.source.exchange.offer(D, H, 1, held(7, 8, 9))
    assert [type(message) for message in pair.deliver()] == [Offer, Accept]
    (_, channel, pieces, _), (_, same_channel, into, _) = (
        pair.source.transport.sends[0],
        pair.destination.transport.receives[0],
    )
    assert channel == same_channel
    assert pieces == [Piece(7 * 32, 64), Piece(9 * 32, 32)]
    assert into == [Piece(0, 64), Piece(5 * 32, 32)]
    pair.destination.now = 10.5
    pair.move()
    assert pair.ends == ([Sent(H, 1)], [Landed(H, 1, 42, P, "manual", 3, 96, 0.5)])


def test_only_missing_blocks_travel(pair: Pair) -> None:
    pair.destination.exchange.expect(H, 1, reserved(0, 1, 5, cached=2))
    pair.source.exchange.offer(D, H, 1, held(7, 8, 9))
    pair.deliver()
    assert pair.source.transport.sends[0][2] == [Piece(9 * 32, 32)]
    pair.move()
    (landed,) = pair.destination.ends
    assert isinstance(landed, Landed)
    assert (landed.blocks, landed.bytes_moved) == (1, 32)


def test_with_nothing_missing_only_the_record_travels(pair: Pair) -> None:
    pair.destination.exchange.expect(H, 1, reserved(0, 1, 5, cached=3))
    pair.source.exchange.offer(D, H, 1, held(7, 8, 9))
    pair.deliver()
    assert not pair.source.transport.sends
    assert not pair.destination.transport.receives
    (landed,) = pair.destination.ends
    assert isinstance(landed, Landed)
    assert (landed.first_token, landed.bytes_moved) == (42, 0)
    assert pair.source.ends == [Sent(H, 1)]


def test_transfers_of_one_destination_use_channels_of_their_own(pair: Pair) -> None:
    for name in "xyz":
        pair.destination.exchange.expect(HandoffId(name), 1, reserved(0))
        pair.source.exchange.offer(D, HandoffId(name), 1, held(0))
    pair.deliver()
    assert len({channel for _, channel, _, _ in pair.destination.transport.receives}) == 3


@pytest.mark.parametrize(
    ("expected", "reason"),
    [
        (None, "nothing is reserved"),
        (reserved(0, 1), "2 blocks are reserved, not 3"),
        (reserved(0, 1, 5, prompt_tokens=11), "reserved for r with 11 prompt tokens"),
    ],
    ids=["unknown", "other size", "other request"],
)
def test_an_offer_that_does_not_fit_is_refused(pair: Pair, expected: ReservedKv | None, reason: str) -> None:
    if expected is not None:
        pair.destination.exchange.expect(H, 1, expected)
    pair.source.exchange.offer(D, H, 1, held(7, 8, 9))
    assert [type(message) for message in pair.deliver()] == [Offer, Refuse]
    assert reason in reasons(pair.source.ends)[0]
    assert pair.destination.ends == []
    assert not pair.destination.transport.receives


def test_another_attempt_is_another_transfer(pair: Pair) -> None:
    pair.destination.exchange.expect(H, 2, reserved(0))
    pair.source.exchange.offer(D, H, 1, held(0))
    pair.deliver()
    assert "nothing is reserved for this handoff and attempt" in reasons(pair.source.ends)[0]


def test_an_offer_that_is_repeated_changes_nothing(pair: Pair) -> None:
    pair.destination.exchange.expect(H, 1, reserved(0))
    for _ in range(2):
        pair.source.exchange.offer(D, H, 1, held(0))
    pair.deliver()
    pair.source.exchange.offer(D, H, 1, held(0))
    pair.deliver()
    pair.move()
    assert [type(end) for ends in pair.ends for end in ends] == [Sent, Landed]


def test_an_offer_to_a_stranger_breaks_at_once(pair: Pair) -> None:
    pair.source.exchange.offer(NodeId("nobody"), H, 1, held(0))
    assert reasons(pair.source.ends) == ["nobody is not connected"]


def test_a_withdrawn_reservation_is_quiet_at_once_and_refuses_what_comes(pair: Pair) -> None:
    pair.destination.exchange.expect(H, 1, reserved(0))
    pair.source.exchange.offer(D, H, 1, held(0))
    pair.destination.exchange.withdraw(H, 1)
    assert reasons(pair.destination.ends) == ["withdrawn before any byte came"]
    pair.deliver()
    assert "refused" in reasons(pair.source.ends)[0]
    assert len(pair.destination.ends) == 1


def test_a_withdrawal_under_way_waits_for_the_bytes(pair: Pair) -> None:
    pair.destination.exchange.expect(H, 1, reserved(0))
    pair.source.exchange.offer(D, H, 1, held(0))
    pair.deliver()
    pair.destination.exchange.withdraw(H, 1)
    assert pair.destination.ends == []
    pair.move()
    assert reasons(pair.destination.ends) == ["withdrawn while the bytes came"]
    assert pair.source.ends == [Sent(H, 1)]
    pair.destination.exchange.withdraw(H, 1)
    assert len(pair.destination.ends) == 1


def test_a_failed_move_breaks_both_sides(pair: Pair) -> None:
    pair.destination.exchange.expect(H, 1, reserved(0))
    pair.source.exchange.offer(D, H, 1, held(0))
    pair.deliver()
    pair.move(TransferError("the lane broke"))
    assert reasons(pair.source.ends) == reasons(pair.destination.ends) == ["the lane broke"]


def test_giving_up_a_peer_ends_offers_that_it_never_answers(pair: Pair) -> None:
    pair.source.exchange.offer(D, H, 1, held(0))
    pair.source.exchange.disconnect(D)
    assert reasons(pair.source.ends) == ["decode-0 was given up"]
    pair.source.exchange.offer(D, H, 2, held(0))
    assert reasons(pair.source.ends)[1:] == ["decode-0 is not connected"]


def test_giving_up_a_peer_ends_transfers_under_way(pair: Pair) -> None:
    pair.destination.exchange.expect(H, 1, reserved(0))
    pair.source.exchange.offer(D, H, 1, held(0))
    pair.deliver()
    pair.source.exchange.disconnect(D)
    pair.destination.exchange.disconnect(P)
    assert [len(ends) for ends in pair.ends] == [1, 1]
    assert "disconnected" in reasons(pair.source.ends)[0]
    assert "disconnected" in reasons(pair.destination.ends)[0]


def test_a_reservation_outlives_a_lost_peer_until_it_is_withdrawn(pair: Pair) -> None:
    pair.destination.exchange.expect(H, 1, reserved(0))
    pair.destination.exchange.disconnect(P)
    assert pair.destination.ends == []
    pair.destination.exchange.withdraw(H, 1)
    assert len(pair.destination.ends) == 1


def test_a_peer_that_comes_back_does_not_know_old_offers(pair: Pair) -> None:
    pair.source.exchange.offer(D, H, 1, held(0))
    reborn = Side(D, incarnation=2)
    pair.source.exchange.connect(reborn.exchange.info)
    assert reasons(pair.source.ends) == ["decode-0 was connected anew"]


def test_messages_of_an_earlier_incarnation_are_dropped(pair: Pair) -> None:
    pair.destination.exchange.expect(H, 1, reserved(0))
    stale = Offer("h", 1, 99, "r", COMPATIBILITY.digest(), 10, 42, (0,))
    pair.destination.transport.on_message(P, encode(stale))
    pair.destination.transport.on_message("stranger", encode(stale))
    assert not pair.destination.transport.frames
    assert not pair.destination.transport.receives


def test_frames_that_make_no_sense_are_dropped(pair: Pair) -> None:
    pair.destination.transport.on_message(P, b"nonsense")
    assert not pair.destination.transport.frames


def test_answers_that_nobody_waits_for_are_dropped(pair: Pair) -> None:
    pair.source.transport.on_message(D, encode(Accept("h", 1, 1, 0, 0, (0,))))
    pair.source.transport.on_message(D, encode(Refuse("h", 1, 1, "no")))
    assert pair.source.ends == []
    assert not pair.source.transport.sends


def test_an_accept_of_another_size_breaks_the_transfer(pair: Pair) -> None:
    pair.source.exchange.offer(D, H, 1, held(7, 8, 9))
    pair.source.transport.on_message(D, encode(Accept("h", 1, 1, 0, 0, (0, 1))))
    assert reasons(pair.source.ends) == ["the destination accepted another number of blocks"]


def test_an_accept_twice_sends_once(pair: Pair) -> None:
    pair.source.exchange.offer(D, H, 1, held(0))
    for _ in range(2):
        pair.source.transport.on_message(D, encode(Accept("h", 1, 1, 0, 0, (0,))))
    assert len(pair.source.transport.sends) == 1
    pair.source.transport.on_message(D, encode(Refuse("h", 1, 1, "no")))
    pair.move()
    assert pair.source.ends == [Sent(H, 1)]


def test_an_offer_of_incompatible_kv_is_refused(pair: Pair) -> None:
    pair.destination.exchange.expect(H, 1, reserved(0))
    other = replace(COMPATIBILITY, dtype="float32").digest()
    pair.destination.transport.on_message(P, encode(Offer("h", 1, 1, "r", other, 10, 42, (0,))))
    ((_, frame),) = pair.destination.transport.frames
    assert decode(frame) == Refuse("h", 1, 1, "the nodes are not compatible")


def test_an_incompatible_peer_is_refused_before_it_is_connected(pair: Pair) -> None:
    info = PeerInfo(NodeId("other"), 1, b"", replace(COMPATIBILITY, layers=9))
    with pytest.raises(IncompatiblePeer, match="layers is 1 here and 9 there"):
        pair.source.exchange.connect(info)
    assert pair.source.transport.connected == [D]


def test_an_offer_that_no_frame_can_hold_breaks_and_is_forgotten(pair: Pair) -> None:
    pair.source.exchange.offer(D, H, 1, held(*range(2**20, 2**20 + 250_000)))
    assert "over the limit" in reasons(pair.source.ends)[0]
    pair.source.exchange.offer(D, H, 1, held(0))
    assert len(pair.source.transport.frames) == 1
