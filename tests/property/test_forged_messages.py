"""Well-formed messages that were never meant: of another peer they change nothing, of the right one they break no rule.

Frames that are not well-formed: `test_wire_property`. Who may send frames at all: `test_cluster_secret`.
"""

from dataclasses import replace
from itertools import chain

from determinism import deterministic
from exchange_pair import BLOCK_BYTES, COMPATIBILITY, LAYERS, TOKENS, D, H, P, Pair, Side, held, reserved
from hypothesis import given
from hypothesis import strategies as st

from handoff.transfer_ends import Broken, Landed, Sent
from handoff.transfer_out import Progress
from handoff.wire import Accept, Cease, Message, Offer, Record, Refuse, Segment, decode, encode
from scheduler.ids import NodeId, RequestId

P2, D2 = NodeId("prefill-1"), NodeId("decode-1")
RESERVED = (3, 9, 4)
FINAL = (7, 8, 20)

ids = st.sampled_from(["h", "other"])
small = st.sampled_from([0, 1, 2, 3, 4, 10, 11, 2**32 - 1])
attempts = st.sampled_from([1, 1, 1, 0, 2])
incarnations = st.sampled_from([1, 1, 1, 1, 0, 2])
blocks = st.lists(st.sampled_from([0, 1, 7, 8, 20, 63, 64, 2**40 - 1]), max_size=5).map(tuple)
layers = st.none() | st.tuples(st.integers(0, LAYERS + 1), st.integers(0, LAYERS + 1))
records = st.none() | st.builds(Record, small, st.sampled_from(["", "x"]))
offers = st.builds(
    Offer, ids, attempts, incarnations, st.sampled_from(["r", "q"]), st.just(COMPATIBILITY.digest()), small
)
likely_segments = st.builds(
    Segment,
    st.just("h"),
    st.just(1),
    st.just(1),
    st.integers(0, 2),
    st.integers(0, 3),
    st.lists(st.sampled_from(FINAL), max_size=4).map(tuple),
    st.just(0),
    records,
    st.none() | layers,
)
messages: st.SearchStrategy[Message] = st.one_of(
    offers,
    likely_segments,
    st.builds(
        Offer, st.just("h"), st.just(1), st.just(1), st.just("r"), st.just(COMPATIBILITY.digest()), st.just(TOKENS)
    ),
    st.builds(Accept, ids, attempts, incarnations, small, small, blocks, st.sampled_from([0, 0, 1, 2])),
    st.builds(Refuse, ids, attempts, incarnations, st.just("no")),
    st.builds(Cease, ids, attempts, incarnations, st.just("no more")),
    st.builds(Segment, ids, attempts, incarnations, small, small, blocks, st.just(0), records, layers),
)


class Joined(Pair):
    """A pair whose sides are each connected to one more node; everything is delivered and moved in steps."""

    def __init__(self) -> None:
        super().__init__()
        self.source.exchange.connect(Side(D2).exchange.info)
        self.destination.exchange.connect(Side(P2).exchange.info)
        self.source.transport.pool[:] = 7
        for number, block in enumerate(FINAL):
            self.source.transport.pool[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = 100 + number
        self.destination.exchange.expect(H, 1, reserved(*RESERVED, source=P))
        self.source.exchange.offer(D, H, 1, RequestId("r"), TOKENS)

    def step(self, number: int) -> None:
        """Deliver one frame each way, or do what comes next."""
        if number % 3 == 0:
            self.deliver_one()
        elif number % 3 == 1:
            self.source.exchange.complete(H, 1, held(*FINAL))
        else:
            self.move()

    def deliver_one(self) -> None:
        for origin, name, target, peer in (
            (self.source, P, self.destination, D),
            (self.destination, D, self.source, P),
        ):
            while origin.transport.frames:
                to, frame = origin.transport.frames.popleft()
                if to == peer:
                    target.transport.on_message(name, frame)
                    break

    def finish(self) -> None:
        for number in chain.from_iterable([range(3)] * 12):
            self.step(number)

    def landed_bytes(self) -> list[int]:
        pool = self.destination.transport.pool
        return [int(pool[block * BLOCK_BYTES]) for block in RESERVED]


@deterministic(600)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), messages), max_size=12))
def test_a_wrong_peer_changes_nothing(said: list[tuple[int, bool, Message]]) -> None:
    joined = Joined()
    for number, to_source, message in said:
        if to_source:
            joined.source.transport.on_message(D2, encode(message))
        else:
            joined.destination.transport.on_message(P2, encode(message))
        joined.step(number)
    joined.finish()
    assert joined.source.ends == [Sent(H, 1)]
    (landed,) = joined.destination.ends
    assert isinstance(landed, Landed)
    assert (landed.source, landed.first_token) == (P, 42)
    assert joined.landed_bytes() == [100, 101, 102]
    assert {peer for peer, *_ in joined.destination.transport.receives} <= {P}


@deterministic(600)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), messages), max_size=12))
def test_the_right_peer_breaks_no_rule(said: list[tuple[int, bool, Message]]) -> None:
    joined = Joined()
    for number, to_source, message in said:
        if to_source:
            joined.source.transport.on_message(D, encode(message))
        else:
            joined.destination.transport.on_message(P, encode(message))
        allowed = {block * BLOCK_BYTES + at for block in RESERVED for at in range(BLOCK_BYTES)}
        for _, _, pieces, _ in joined.destination.transport.receives:
            assert all(allowed.issuperset(range(p.offset, p.offset + p.length)) for p in pieces)
        for _, _, pieces, _ in joined.source.transport.sends:
            assert all(p.offset // BLOCK_BYTES in FINAL for p in pieces)
        joined.step(number)
    joined.finish()
    assert len(joined.source.ends) <= 1
    assert len(joined.destination.ends) <= 1


@deterministic(300)
@given(messages, st.integers(2, 9))
def test_another_incarnation_is_not_heard(message: Message, incarnation: int) -> None:
    joined = Joined()
    joined.deliver_one()
    stale = encode(_of(message, incarnation))
    joined.destination.transport.on_message(P, stale)
    joined.source.transport.on_message(D, stale)
    joined.finish()
    assert joined.source.ends == [Sent(H, 1)]
    assert len(joined.destination.ends) == 1
    assert joined.landed_bytes() == [100, 101, 102]


def _of(message: Message, incarnation: int) -> Message:
    fields = {name: getattr(message, name) for name in message.__struct_fields__}
    return type(message)(**{**fields, "incarnation": incarnation})


def test_every_message_of_an_ended_transfer_changes_nothing_when_it_comes_again() -> None:
    pair = Pair()
    pair.destination.exchange.expect(H, 1, reserved(*RESERVED))
    pair.source.send(*FINAL)
    said = pair.deliver()
    pair.move()
    ends = [list(side) for side in pair.ends]
    pair.destination.exchange.expect(H, 2, reserved(*RESERVED))
    for message in said:
        for side, peer in ((pair.destination, P), (pair.source, D)):
            side.transport.on_message(peer, encode(message))
    assert [list(side) for side in pair.ends] == ends
    assert not pair.destination.transport.receives
    assert not pair.source.transport.sends
    # The offer alone is answered, so that a source which lost its memory of it learns.
    answers = [decode(frame) for _, frame in pair.destination.transport.frames]
    assert [type(answer) for answer in answers] == [Refuse]
    pair.deliver()
    assert [list(side) for side in pair.ends] == ends


def test_an_offer_that_comes_again_under_way_changes_nothing() -> None:
    pair = Pair()
    pair.destination.exchange.expect(H, 1, reserved(*RESERVED))
    pair.source.send(*FINAL)
    offer = encode(pair.deliver()[0])
    receives = list(pair.destination.transport.receives)
    pair.destination.transport.on_message(P, offer)
    assert [decode(frame) for _, frame in pair.destination.transport.frames] == [
        Refuse("h", 1, 1, "this handoff and attempt is being received already")
    ]
    assert pair.destination.transport.receives == receives
    pair.deliver()
    pair.move()
    assert [type(end) for ends in pair.ends for end in ends] == [Sent, Landed]


def test_a_segment_that_comes_again_is_not_received_again_and_ends_the_peer() -> None:
    joined = Joined()
    joined.deliver()
    joined.source.exchange.advance(H, 1, Progress(tuple(FINAL), 1))
    ((_, frame),) = joined.source.transport.frames
    joined.destination.transport.on_message(P, frame)
    assert len(joined.destination.transport.receives) == 1
    joined.destination.transport.on_message(P, frame)
    assert joined.destination.transport.receives == []
    assert [type(end) for end in joined.destination.ends] == [Broken]
    assert P not in joined.destination.transport.connected


def test_an_incarnation_that_was_replaced_is_not_heard() -> None:
    pair = Pair()
    pair.destination.exchange.expect(H, 1, reserved(*RESERVED))
    pair.source.exchange.offer(D, H, 1, RequestId("r"), TOKENS)
    recorded = pair.source.transport.frames[0][1]
    reborn = Side(P, incarnation=2)
    pair.destination.exchange.connect(replace(reborn.exchange.info, node=P))
    pair.destination.transport.on_message(P, recorded)
    assert not pair.destination.transport.frames
