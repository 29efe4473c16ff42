import tracemalloc

import msgspec
import pytest

from handoff.wire import (
    MAX_FRAME_BYTES,
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

OFFER = Offer("h", 1, 7, "r", "digest", 10, "adapter")
ACCEPT = Accept("h", 1, 7, channel=5, cached_tokens=16, blocks=(8, 9))
SEGMENT = Segment("h", 1, 7, 2, 4, (3, 1, 2), 2**64 - 1, Record(42), (3, 5))
CEASE = Cease("h", 1, 7, "cancelled")
REFUSE = Refuse("h", 1, 7, "nothing is reserved")
HEADER = b"PRLY" + PROTOCOL_VERSION.to_bytes(2, "little")


def frame_of(**fields: object) -> bytes:
    return HEADER + msgspec.msgpack.encode(fields)


@pytest.mark.parametrize("message", [OFFER, ACCEPT, REFUSE, SEGMENT, CEASE], ids=lambda message: type(message).__name__)
def test_a_message_survives_the_wire(message: Message) -> None:
    assert decode(encode(message)) == message


def test_the_frame_begins_with_magic_and_version() -> None:
    assert encode(REFUSE).startswith(HEADER)


@pytest.mark.parametrize("length", range(6))
def test_a_truncated_header_is_refused(length: int) -> None:
    with pytest.raises(WireError, match="shorter than its header"):
        decode(encode(OFFER)[:length])


def test_a_truncated_body_is_refused_at_every_length() -> None:
    frame = encode(OFFER)
    for length in range(len(HEADER), len(frame)):
        with pytest.raises(WireError, match="content is wrong"):
            decode(frame[:length])


def test_bytes_after_the_message_are_refused() -> None:
    with pytest.raises(WireError, match="content is wrong"):
        decode(encode(OFFER) + b"\x00")


def test_another_magic_or_version_is_named() -> None:
    frame = encode(OFFER)
    with pytest.raises(WireError, match="HTTP"):
        decode(b"HTTP" + frame[4:])
    with pytest.raises(WireError, match="speaks version 9, this node speaks 4"):
        decode(frame[:4] + b"\x09\x00" + frame[6:])


GOOD = {"type": "refuse", "handoff_id": "h", "attempt": 1, "incarnation": 1, "reason": ""}


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "surprise"},
        {"handoff_id": ""},
        {"handoff_id": "x" * 129},
        {"handoff_id": 5},
        {"attempt": -1},
        {"attempt": 2**40},
        {"attempt": 1.5},
        {"attempt": True},
        {"attempt": "1"},
        {"reason": "x" * 501},
        {"reason": None},
        {"extra": 1},
    ],
    ids=str,
)
def test_every_field_is_checked(wrong: dict[str, object]) -> None:
    assert decode(frame_of(**GOOD)) == Refuse("h", 1, 1, "")
    with pytest.raises(WireError, match="content is wrong"):
        decode(frame_of(**{**GOOD, **wrong}))


@pytest.mark.parametrize("field", ["handoff_id", "attempt", "incarnation", "reason", "type"])
def test_no_field_may_be_missing(field: str) -> None:
    with pytest.raises(WireError, match="content is wrong"):
        decode(frame_of(**{name: value for name, value in GOOD.items() if name != field}))


def test_a_channel_is_what_a_transport_takes() -> None:
    fields = msgspec.to_builtins(ACCEPT)
    assert decode(frame_of(**{**fields, "channel": 2**32 - 1}))
    with pytest.raises(WireError):
        decode(frame_of(**{**fields, "channel": 2**32}))


def test_segments_are_numbered_as_far_as_their_channels_go() -> None:
    fields = msgspec.to_builtins(SEGMENT)
    assert decode(frame_of(**{**fields, "number": MAX_SEGMENTS - 1}))
    with pytest.raises(WireError):
        decode(frame_of(**{**fields, "number": MAX_SEGMENTS}))


def test_frames_have_a_size_limit_on_both_sides() -> None:
    huge = Accept("h", 1, 1, 1, 1, tuple(range(2**30, 2**30 + 250_000)))
    with pytest.raises(WireError, match="over the limit"):
        encode(huge)
    with pytest.raises(WireError, match="over the limit"):
        decode(HEADER + bytes(MAX_FRAME_BYTES))


@pytest.mark.parametrize(
    "body",
    [
        b"\x91" * 100_000,
        b"\x81" * 100_000,
        b"\x81\xa1\xff\x01",
        b"\xc1",
        b"\x80",
        b"\xdf" + b"\xff" * 4,
        b"\xd8" * 40,
    ],
    ids=lambda body: body[:4].hex(),
)
def test_hostile_bodies_are_wire_errors(body: bytes) -> None:
    with pytest.raises(WireError):
        decode(HEADER + body)


@pytest.mark.parametrize("claim", [2**32 - 1, 200_000_000, 200_000], ids=str)
def test_a_claim_of_many_blocks_allocates_nothing(claim: int) -> None:
    frame = encode(Accept("h", 1, 7, channel=5, cached_tokens=16, blocks=(1, 2, 3)))
    tracemalloc.start()
    with pytest.raises(WireError, match="content is wrong"):
        decode(frame.replace(b"\x93\x01\x02\x03", b"\xdd" + claim.to_bytes(4, "big") + b"\x01\x02\x03"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 16
