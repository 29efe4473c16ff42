"""KV on its way while the prefill goes on: segments, lost blocks, calls for an end, checksums."""

import numpy as np
import pytest
from exchange_pair import BLOCK_BYTES, TOKENS, D, H, P, Pair, held, reasons, reserved

from handoff.transfer_ends import Broken, Ceased, Landed, Sent
from handoff.transfer_out import Outgoing, Progress
from handoff.transports.base import Piece, TransferError
from handoff.wire import MAX_SEGMENTS, Accept, Cease, Record, Segment, decode, encode
from scheduler.ids import RequestId

BLOCKS = (7, 8, 9)


@pytest.fixture
def pair() -> Pair:
    """An open transfer of three blocks."""
    pair = Pair()
    pair.destination.exchange.expect(H, 1, reserved(0, 1, 5))
    pair.source.exchange.offer(D, H, 1, RequestId("r"), TOKENS)
    pair.deliver()
    pool = pair.source.transport.pool
    pool[:] = np.arange(len(pool)) % 251
    return pair


def advance(pair: Pair, final: int, blocks: tuple[int, ...] = BLOCKS, generation: int = 0) -> None:
    pair.source.exchange.advance(H, 1, Progress(blocks, final, generation))


def complete(pair: Pair) -> bool:
    return pair.source.exchange.complete(H, 1, held(*BLOCKS))


def sent(pair: Pair) -> list[Segment]:
    return [message for message in pair.deliver() if isinstance(message, Segment)]


def test_blocks_travel_as_they_become_final(pair: Pair) -> None:
    advance(pair, 0)
    assert sent(pair) == []
    advance(pair, 1)
    assert [(s.number, s.first_block, s.blocks, s.record) for s in sent(pair)] == [(0, 0, (7,), None)]
    pair.move()
    assert pair.ends == ([], [])
    complete(pair)
    ((number, first, blocks, record),) = [(s.number, s.first_block, s.blocks, s.record) for s in sent(pair)]
    assert (number, first, blocks, record) == (1, 1, (8, 9), Record(42))
    assert pair.destination.transport.receives[0][2] == [Piece(BLOCK_BYTES, BLOCK_BYTES), Piece(5 * 32, BLOCK_BYTES)]
    pair.destination.now = 10.25
    pair.move()
    (landed,) = pair.destination.ends
    assert isinstance(landed, Landed)
    assert (landed.blocks, landed.bytes_moved, landed.seconds, landed.exposed_s) == (3, 96, 0.25, 0.25)
    assert pair.source.ends == [Sent(H, 1)]


def test_segments_under_way_at_a_time_have_channels_of_their_own(pair: Pair) -> None:
    advance(pair, 1)
    advance(pair, 2)
    complete(pair)
    pair.deliver()
    assert [operation[1] for operation in pair.source.transport.sends] == [0, 1, 2]
    assert [operation[1] for operation in pair.destination.transport.receives] == [0, 1, 2]
    pair.move()
    assert isinstance(pair.destination.ends[0], Landed)


def test_what_is_final_before_the_answer_goes_out_with_it() -> None:
    pair = Pair()
    pair.source.exchange.offer(D, H, 1, RequestId("r"), TOKENS)
    advance(pair, 2)
    assert not pair.source.transport.sends
    pair.source.transport.on_message(D, encode(Accept("h", 1, 1, 0, 4, (1, 5))))
    ((_, _, pieces, _),) = pair.source.transport.sends
    assert pieces == [Piece(8 * BLOCK_BYTES, BLOCK_BYTES)]


def test_a_record_that_comes_alone_lands_when_the_blocks_have(pair: Pair) -> None:
    pair.source.exchange.advance(H, 1, Progress(BLOCKS, 3))
    pair.deliver()
    complete(pair)
    (last,) = sent(pair)
    assert (last.first_block, last.blocks) == (3, ())
    assert pair.destination.ends == []
    pair.move()
    assert isinstance(pair.destination.ends[0], Landed)
    assert pair.source.ends == [Sent(H, 1)]


def test_a_prefill_that_lost_its_blocks_sends_again_what_was_not_surely_sent(pair: Pair) -> None:
    advance(pair, 1)
    pair.deliver()
    pair.move()
    advance(pair, 2)  # the first block had been sent before this
    pair.deliver()
    advance(pair, 0, (), generation=1)
    advance(pair, 3, (20, 21, 22), generation=1)
    assert sent(pair) == []  # block 8 is still under way
    pair.move()
    assert [(s.first_block, s.blocks) for s in sent(pair)] == [(1, (21, 22))]
    pair.move()
    pair.source.exchange.complete(H, 1, held(20, 21, 22, generation=1))
    pair.deliver()
    pair.move()
    assert isinstance(pair.destination.ends[0], Landed)


def test_a_prefill_that_was_called_off_before_the_answer(pair: Pair) -> None:
    pair = Pair()
    pair.destination.exchange.expect(H, 1, reserved(0, 1, 5))
    pair.source.exchange.offer(D, H, 1, RequestId("r"), TOKENS)
    pair.source.exchange.cease(H, 1, "cancelled")
    assert pair.source.ends == [Ceased(H, 1)]
    pair.deliver()
    assert pair.destination.ends == [Ceased(H, 1)]


def test_a_prefill_that_is_called_off_ends_when_its_bytes_have(pair: Pair) -> None:
    advance(pair, 1)
    pair.deliver()
    pair.source.exchange.cease(H, 1, "cancelled")
    pair.deliver()
    assert pair.ends == ([], [])
    advance(pair, 2)
    assert sent(pair) == []
    pair.move()
    assert pair.ends == ([Ceased(H, 1)], [Ceased(H, 1)])
    assert not complete(pair)


def test_a_destination_that_withdraws_takes_what_is_under_way(pair: Pair) -> None:
    advance(pair, 1)
    pair.deliver()
    pair.destination.exchange.withdraw(H, 1)
    advance(pair, 2)  # crosses the withdrawal
    pair.deliver()
    assert len(pair.destination.transport.receives) == 2
    assert pair.ends == ([], [])
    pair.move()
    assert pair.ends == ([Ceased(H, 1)], [Ceased(H, 1)])


def test_a_withdrawal_after_the_record_lets_it_land(pair: Pair) -> None:
    complete(pair)
    pair.deliver()
    pair.destination.exchange.withdraw(H, 1)
    assert pair.deliver() == []
    pair.move()
    assert pair.ends == ([Sent(H, 1)], [Ceased(H, 1)])


@pytest.mark.parametrize("is_last", [True, False])
def test_other_bytes_than_were_sent_never_land(pair: Pair, is_last: bool) -> None:
    if is_last:
        complete(pair)
    else:
        advance(pair, 2)
    pair.source.transport.pool[8 * BLOCK_BYTES + 3] += 1  # overwritten while it is read
    pair.deliver()
    pair.move()
    messages = pair.deliver()
    assert "segment 0" in reasons(pair.destination.ends)[0]
    assert "checksums differ" in reasons(pair.destination.ends)[0]
    if is_last:
        assert pair.source.ends == [Sent(H, 1)]
    else:
        assert [type(message) for message in messages] == [Cease, Cease]
        assert pair.source.ends == [Ceased(H, 1)]


def test_a_failed_segment_ends_both_sides_with_no_more_segments(pair: Pair) -> None:
    advance(pair, 1)
    pair.deliver()
    pair.move(TransferError("the lane broke"))
    assert reasons(pair.source.ends) == reasons(pair.destination.ends) == ["the lane broke"]
    complete(pair)
    assert sent(pair) == []


def test_a_send_that_fails_alone_is_told_to_the_destination(pair: Pair) -> None:
    """What was received before had come whole, so only the source knows."""
    advance(pair, 1)
    pair.deliver()
    advance(pair, 2)
    ((_, _, _, first), (_, _, _, second)) = pair.source.transport.sends
    pair.source.transport.sends.clear()
    pair.destination.transport.receives.pop()[3](None)
    first(TransferError("the lane broke"))
    assert pair.source.ends == []
    pair.deliver()
    second(None)
    assert reasons(pair.source.ends) == ["the lane broke"]
    for operation in pair.destination.transport.receives:
        operation[3](None)
    assert [type(end) for end in pair.destination.ends] == [Broken]


@pytest.mark.parametrize(
    "segment",
    [
        Segment("h", 1, 1, 1, 0, (7,)),
        Segment("h", 1, 1, 0, 1, (7,)),
        Segment("h", 1, 1, 0, 0, (7, 8, 9, 10)),
        Segment("h", 1, 1, 0, 0, (7,), 0, Record(1)),
        Segment("h", 1, 1, 0, 0, BLOCKS, 0, None, (1, 2)),
        Segment("h", 1, 1, 0, 0, BLOCKS, 0, None, (0, 5)),
        Segment("h", 1, 1, 0, 0, BLOCKS, 0, None, (0, 0)),
        Segment("h", 1, 1, 0, 0, (7, 8), 0, None, (0, 1)),
        Segment("h", 1, 1, 0, 0, BLOCKS, 0, Record(1), (0, 3)),
    ],
    ids=[
        "another number",
        "a gap",
        "too many",
        "the record too early",
        "a gap between layers",
        "too many layers",
        "no layer",
        "layers of other than the last blocks",
        "the record before the last layer",
    ],
)
def test_a_peer_that_breaks_the_protocol_is_given_up(pair: Pair, segment: Segment) -> None:
    pair.destination.transport.on_message(P, encode(segment))
    assert "was given up" in reasons(pair.destination.ends)[0]
    assert pair.destination.transport.connected == []
    assert not pair.destination.transport.receives


def test_an_adapter_that_changed_meanwhile_is_noticed() -> None:
    pair = Pair()
    digests = {"a": "1"}
    pair.source.exchange._wiring._adapter_digest = pair.destination.exchange._wiring._adapter_digest = (
        digests.__getitem__
    )
    pair.destination.exchange.expect(H, 1, reserved(0, 1, 5, adapter="a"))
    pair.source.exchange.offer(D, H, 1, RequestId("r"), TOKENS, "a")
    pair.deliver()
    pair.source.exchange._wiring._adapter_digest = lambda name: "2"
    pair.source.exchange.complete(H, 1, held(*BLOCKS, adapter="a"))
    pair.deliver()
    pair.move()
    assert "adapter a is not the same on both nodes" in reasons(pair.destination.ends)[0]


def test_giving_up_a_peer_in_the_middle_ends_both_sides_once(pair: Pair) -> None:
    advance(pair, 1)
    pair.deliver()
    advance(pair, 2)
    pair.source.exchange.disconnect(D)
    pair.destination.exchange.disconnect(P)
    assert [len(ends) for ends in pair.ends] == [1, 1]
    assert "given up" in reasons(pair.source.ends)[0]
    assert "given up" in reasons(pair.destination.ends)[0]


def test_a_source_keeps_its_last_segment_for_the_record() -> None:
    out = Outgoing(D, (MAX_SEGMENTS + 10) * 4, 4, 4)
    out.accept(Accept("h", 1, 1, 2**32 - 1, 0, tuple(range(MAX_SEGMENTS + 10))))
    blocks = tuple(range(MAX_SEGMENTS + 10))
    numbers = []
    for final in range(1, len(blocks) + 1):
        out.advance(Progress(blocks, final))
        cut = out.next()
        if cut is not None:
            numbers.append(cut.number)
            out.sent(cut.number, None)
    assert numbers == list(range(MAX_SEGMENTS - 1))
    assert not out.is_over
    out.advance(Progress(blocks, len(blocks), record=Record(1)))
    last = out.next()
    assert last is not None
    assert (last.number, last.first, len(last.blocks), last.channel) == (
        MAX_SEGMENTS - 1,
        MAX_SEGMENTS - 1,
        11,
        MAX_SEGMENTS - 2,
    )


def test_frames_say_what_they_are(pair: Pair) -> None:
    advance(pair, 1)
    ((_, frame),) = pair.source.transport.frames
    segment = decode(frame)
    assert isinstance(segment, Segment)
    assert segment.checksum == pair.source.exchange._wiring.checksum("sampled", (7,), ())
