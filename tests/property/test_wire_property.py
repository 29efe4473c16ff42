"""Whatever bytes come, decoding ends with a message or a WireError."""

from contextlib import suppress

from determinism import deterministic
from hypothesis import given
from hypothesis import strategies as st

from handoff.wire import (
    MAX_SEGMENTS,
    PROTOCOL_VERSION,
    Accept,
    Cease,
    Message,
    Offer,
    Record,
    Refuse,
    Segment,
    WireError,
    decode,
    encode,
)

HEADER = b"PRLY" + PROTOCOL_VERSION.to_bytes(2, "little")
ids = st.text(min_size=1, max_size=128)
counts = st.integers(0, 2**40 - 1)
blocks = st.lists(counts, max_size=50).map(tuple)
layers = st.integers(0, 2**16 - 1)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(Offer, ids, counts, counts, ids, ids, counts, st.text(max_size=128)),
    st.builds(Accept, ids, counts, counts, st.integers(0, 2**32 - 1), counts, blocks),
    st.builds(Refuse, ids, counts, counts, st.text(max_size=500)),
    st.builds(Cease, ids, counts, counts, st.text(max_size=500)),
    st.builds(
        Segment,
        ids,
        counts,
        counts,
        st.integers(0, MAX_SEGMENTS - 1),
        counts,
        blocks,
        st.integers(0, 2**64 - 1),
        st.none() | st.builds(Record, counts, st.text(max_size=128)),
        st.none() | st.tuples(layers, layers),
    ),
)


@deterministic(100)
@given(messages)
def test_every_message_survives_the_wire(message: Message) -> None:
    assert decode(encode(message)) == message


@deterministic(200)
@given(st.binary(max_size=200))
def test_arbitrary_bodies_never_escape(body: bytes) -> None:
    with suppress(WireError):
        decode(HEADER + body)


@deterministic(300)
@given(messages, st.data())
def test_damaged_frames_never_escape(message: Message, data: st.DataObject) -> None:
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with suppress(WireError):
        decode(bytes(frame))
