from dataclasses import replace

import pytest
from exchange_pair import COMPATIBILITY, D, H, P, Pair, Side, reasons, reserved

from handoff.compatibility import IncompatiblePeer
from handoff.transfer_ends import Ceased, Landed, Sent
from handoff.transports.base import Piece, TransferError
from handoff.wire import Accept, Cease, Offer, Refuse, Segment, decode, encode
from handoff.wiring import PeerInfo
from scheduler.decode_scheduler import ReservedKv
from scheduler.ids import HandoffId, NodeId


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_blocks_land_and_both_sides_report_it_once(pair: Pair) -> None:
    pair.destination.exchange.expect(H, 1, reserved(0, 1, 5))
    pair.source.send(7, 8, 9)
    assert [type(message) for message in pair.deliver()] == [Offer, Accept, Segment]
    (_, channel, pieces, _), (_, same_channel, into, _) = (
        pair.source.transport.sends[0],
        pair.destination.transport.receives[0],
    )
    assert channel == same_channel
    assert pieces == [Piece(7 * 32, 64), Piece(9 * 32, 32)]
    assert into == [Piece(0, 64), Piece(5 * 32, 32)]
    pair.destination.now = 10.5
    pair.move()
    assert pair.ends == ([Sent(H, 1)], [Landed(H, 1, 42, P, "manual", 3, 96, 0.5, 0.5, 96)])


def test_only_missing_blocks_travel(pair: Pair) -> None:
    pair.destination.exchange.expect(H, 1, reserved(0, 1, 5, cached=2))
    pair.source.send(7, 8, 9)
    pair.deliver()
    assert pair.source.transport.sends[0][2] == [Piece(9 * 32, 32)]
    pair.move()
    (landed,) = pair.destination.ends
    assert isinstance(landed, Landed)
    assert (landed.blocks, landed.bytes_moved) == (1, 32)


def test_with_nothing_missing_only_the_record_travels(pair: Pair) -> None:
    pair.destination.exchange.expect(H, 1, reserved(0, 1, 5, cached=3))
    pair.source.send(7, 8, 9)
    pair.deliver()
    assert not pair.source.transport.sends
    assert not pair.destination.transport.receives
    (landed,) = pair.destination.ends
    assert isinstance(landed, Landed)
    assert (landed.first_token, landed.bytes_moved) == (42, 0)
    assert pair.source.ends == [Sent(H, 1)]


def test_transfers_of_one_destination_use_channels_of_their_own(pair: Pair) -> None:
    for name in "xyz":
        pair.destination.exchange.expect(HandoffId(name), 1, reserved(0, 1, 2))
        pair.source.send(7, 8, 9, name=HandoffId(name))
    pair.deliver()
    assert len({channel for _, channel, _, _ in pair.destination.transport.receives}) == 3


@pytest.mark.parametrize(
    ("expected", "reason"),
    [
        (None, "nothing is reserved"),
        (reserved(0, 1, 5, prompt_tokens=11), "reserved for r with 11 prompt tokens"),
    ],
    ids=["unknown", "other request"],
)
def test_an_offer_that_does_not_fit_is_refused(pair: Pair, expected: ReservedKv | None, reason: str) -> None:
    if expected is not None:
        pair.destination.exchange.expect(H, 1, expected)
    pair.source.send(7, 8, 9)
    assert [type(message) for message in pair.deliver()] == [Offer, Refuse]
    assert reason in reasons(pair.source.ends)[0]
    assert pair.destination.ends == []
    assert not pair.destination.transport.receives


def test_another_attempt_is_another_transfer(pair: Pair) -> None:
    pair.destination.exchange.expect(H, 2, reserved(0, 1, 2))
    pair.source.send(7, 8, 9)
    pair.deliver()
    assert "nothing is reserved for this handoff and attempt" in reasons(pair.source.ends)[0]


def test_an_offer_that_is_repeated_changes_nothing(pair: Pair) -> None:
    pair.destination.exchange.expect(H, 1, reserved(0, 1, 2))
    for _ in range(2):
        pair.source.send(7, 8, 9)
    pair.deliver()
    pair.source.send(7, 8, 9)
    pair.deliver()
    pair.move()
    assert [type(end) for ends in pair.ends for end in ends] == [Sent, Landed]


def test_an_offer_to_a_stranger_breaks_at_once(pair: Pair) -> None:
    pair.source.send(7, 8, 9, to=NodeId("nobody"))
    assert reasons(pair.source.ends) == ["nobody is not connected"]


def test_a_withdrawn_reservation_is_quiet_at_once_and_refuses_what_comes(pair: Pair) -> None:
    pair.destination.exchange.expect(H, 1, reserved(0, 1, 2))
    pair.source.send(7, 8, 9)
    pair.destination.exchange.withdraw(H, 1)
    assert pair.destination.ends == [Ceased(H, 1)]
    pair.deliver()
    assert "refused" in reasons(pair.source.ends)[0]
    assert len(pair.destination.ends) == 1


def test_a_withdrawal_under_way_waits_for_the_bytes(pair: Pair) -> None:
    pair.destination.exchange.expect(H, 1, reserved(0, 1, 2))
    pair.source.send(7, 8, 9)
    pair.deliver()
    pair.destination.exchange.withdraw(H, 1)
    assert pair.destination.ends == []
    pair.move()
    assert pair.destination.ends == [Ceased(H, 1)]
    assert pair.source.ends == [Sent(H, 1)]
    pair.destination.exchange.withdraw(H, 1)
    assert len(pair.destination.ends) == 1


def test_a_failed_move_breaks_both_sides(pair: Pair) -> None:
    pair.destination.exchange.expect(H, 1, reserved(0, 1, 2))
    pair.source.send(7, 8, 9)
    pair.deliver()
    pair.move(TransferError("the lane broke"))
    assert reasons(pair.source.ends) == reasons(pair.destination.ends) == ["the lane broke"]


def test_giving_up_a_peer_ends_offers_that_it_never_answers(pair: Pair) -> None:
    pair.source.send(7, 8, 9)
    pair.source.exchange.disconnect(D)
    assert reasons(pair.source.ends) == ["decode-0 was given up"]
    pair.source.send(7, 8, 9, attempt=2)
    assert reasons(pair.source.ends)[1:] == ["decode-0 is not connected"]


def test_giving_up_a_peer_ends_transfers_under_way(pair: Pair) -> None:
    pair.destination.exchange.expect(H, 1, reserved(0, 1, 2))
    pair.source.send(7, 8, 9)
    pair.deliver()
    pair.source.exchange.disconnect(D)
    pair.destination.exchange.disconnect(P)
    assert [len(ends) for ends in pair.ends] == [1, 1]
    assert "disconnected" in reasons(pair.source.ends)[0]
    assert "disconnected" in reasons(pair.destination.ends)[0]


def test_a_reservation_outlives_a_lost_peer_until_it_is_withdrawn(pair: Pair) -> None:
    pair.destination.exchange.expect(H, 1, reserved(0, 1, 2))
    pair.destination.exchange.disconnect(P)
    assert pair.destination.ends == []
    pair.destination.exchange.withdraw(H, 1)
    assert len(pair.destination.ends) == 1


def test_a_peer_that_comes_back_does_not_know_old_offers(pair: Pair) -> None:
    pair.source.send(7, 8, 9)
    reborn = Side(D, incarnation=2)
    pair.source.exchange.connect(reborn.exchange.info)
    assert reasons(pair.source.ends) == ["decode-0 was connected anew"]


def test_messages_of_an_earlier_incarnation_are_dropped(pair: Pair) -> None:
    pair.destination.exchange.expect(H, 1, reserved(0, 1, 2))
    stale = Offer("h", 1, 99, "r", COMPATIBILITY.digest(), 10)
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


@pytest.mark.parametrize(
    ("cached_tokens", "blocks"),
    [(0, (0, 1)), (4, (0, 1, 2)), (2, (0, 1, 2)), (40, ())],
    ids=["too few", "too many", "in the middle of a block", "more than all"],
)
def test_an_accept_that_does_not_fit_breaks_the_transfer(
    pair: Pair, cached_tokens: int, blocks: tuple[int, ...]
) -> None:
    pair.source.send(7, 8, 9)
    pair.source.transport.on_message(D, encode(Accept("h", 1, 1, 0, cached_tokens, blocks)))
    assert "accepted: " in reasons(pair.source.ends)[0]
    assert isinstance(decode(pair.source.transport.frames[-1][1]), Cease)


def test_an_accept_twice_sends_once(pair: Pair) -> None:
    pair.destination.exchange.expect(H, 1, reserved(0, 1, 2))
    pair.source.send(7, 8, 9)
    pair.deliver()
    pair.source.transport.on_message(D, encode(Accept("h", 1, 1, 0, 0, (0, 1, 2))))
    assert len(pair.source.transport.sends) == 1
    pair.source.transport.on_message(D, encode(Refuse("h", 1, 1, "no")))
    pair.move()
    assert pair.source.ends == [Sent(H, 1)]


def test_an_offer_of_incompatible_kv_is_refused(pair: Pair) -> None:
    pair.destination.exchange.expect(H, 1, reserved(0, 1, 2))
    other = replace(COMPATIBILITY, dtype="float32").digest()
    pair.destination.transport.on_message(P, encode(Offer("h", 1, 1, "r", other, 10)))
    ((_, frame),) = pair.destination.transport.frames
    assert decode(frame) == Refuse("h", 1, 1, "prefill-0 is not what it was when it was connected")


def test_an_incompatible_peer_is_refused_before_it_is_connected(pair: Pair) -> None:
    info = PeerInfo(NodeId("other"), 1, b"", replace(COMPATIBILITY, layers=9))
    with pytest.raises(IncompatiblePeer, match="layers is 1 at the source and 9 at the destination"):
        pair.source.exchange.connect(info)
    assert pair.source.transport.connected == [D]


def test_an_accept_that_no_frame_can_hold_is_a_refusal(pair: Pair) -> None:
    pair.destination.exchange.expect(H, 1, reserved(*range(2**30, 2**30 + 210_000)))
    pair.source.send(7, 8, 9)
    pair.deliver()
    assert "over the limit" in reasons(pair.destination.ends)[0]
    assert "over the limit" in reasons(pair.source.ends)[0]
