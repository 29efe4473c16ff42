"""Whatever bytes come, what UCX transports say to each other ends as a value or a ValueError, in bounded memory."""

import tracemalloc
from collections.abc import Callable
from contextlib import suppress

import numpy as np
from determinism import deterministic
from hypothesis import given
from hypothesis import strategies as st

from handoff.transports.ucx_offer import FRAME_PIECES, MAX_PART_BYTES, MAX_PIECES, Offer, OfferPart
from handoff.transports.ucx_seal import NONCE_BYTES, ClusterKey, Opener
from handoff.transports.ucx_shared import SharedLane
from handoff.transports.ucx_wire import HELLO_BYTES, NOTE_BYTES, Address, Hello, Note, Tell

KEY = ClusterKey(b"secret")
DECODERS: dict[str, Callable[[bytes], object]] = {
    "address": Address.unpack,
    "hello": Hello.unpack,
    "note": Note.unpack,
    "offer": OfferPart.unpack,
    "frame": lambda data: Opener(b"k" * 32).open(1 << 63, memoryview(data)),
}
STARTS = st.sampled_from([b"", b"PLA4", b"PLH3", b"PLO1"])
SIZES = st.sampled_from([HELLO_BYTES, NOTE_BYTES, 20 + 16, 20 + 32])
numbers = st.integers(0, 2**32 - 1)
nonces = st.binary(min_size=NONCE_BYTES, max_size=NONCE_BYTES)
ids = st.binary(min_size=8, max_size=8)


@deterministic(300)
@given(
    st.sampled_from(sorted(DECODERS)),
    STARTS,
    st.binary(max_size=300) | SIZES.flatmap(lambda n: st.binary(min_size=n, max_size=n)),
)
def test_arbitrary_bytes_never_escape(decoder: str, start: bytes, rest: bytes) -> None:
    with suppress(ValueError):
        DECODERS[decoder](start + rest[len(start) :])


@deterministic(100)
@given(ids, ids, numbers, numbers, nonces, nonces, st.booleans())
def test_hellos_come_back(
    identity: bytes, receiver: bytes, number: int, seen: int, nonce: bytes, echo: bytes, reads: bool
) -> None:
    hello = Hello(identity, receiver, number, seen, nonce, echo, reads)
    assert Hello.unpack(hello.pack(KEY)) == hello


@deterministic(100)
@given(st.sampled_from(Tell), numbers, st.integers(0, 2**64 - 1))
def test_notes_come_back(tell: Tell, channel: int, count: int) -> None:
    note = Note(tell, channel, count)
    assert Note.unpack(note.pack()) == note


def part(channel: int, number: int, total: int, count: int) -> OfferPart:
    return OfferPart(channel, number, total, np.arange(count), np.ones(count, np.int64))


@deterministic(200)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 2), st.integers(0, 40), st.integers(1, 20)), max_size=20))
def test_parts_of_offers_in_any_order_are_bounded(said: list[tuple[int, int, int, int]]) -> None:
    lane = SharedLane(1, None, None)
    for channel, number, total, count in said:
        with suppress(ValueError):
            lane.take_offer(part(channel, number, total, count).pack())
    for offers in lane._offers.values():
        assert all(len(offer.offsets) <= offer._total for offer in offers)
        assert all(offer.complete for offer in list(offers)[:-1])


def test_no_claim_makes_an_offer_allocate() -> None:
    claims = [part(1, 1, 2**63, 1), part(1, 1, MAX_PIECES + 1, 1), part(1, 1, 0, 1)]
    tracemalloc.start()
    for claim in claims:
        try:
            OfferPart.unpack(claim.pack())
        except ValueError:
            continue
        raise AssertionError("a claim of too many pieces was taken")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    longest = part(1, 1, FRAME_PIECES, FRAME_PIECES).pack()
    assert len(longest) == MAX_PART_BYTES
    assert Offer(OfferPart.unpack(longest)).complete
