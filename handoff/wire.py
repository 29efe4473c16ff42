"""What two nodes say to each other around a transfer: MessagePack, framed, versioned, size-limited, checked.

    frame    magic "PRLY" | version u16 LE | MessagePack map with a "type"

    source   Offer   ----------------->  destination     a request that is, or will be, read here
             <-----------------  Accept | Refuse         the blocks that it is to land in
             Segment ----------------->                  pieces follow on this segment's channel; as often as new blocks
             pieces  ----------------->                  are final, the last one with the record: first token, counts;
                                                         the prompt's last blocks also as their layers become final
             <-- Cease | Cease ------->                  no more is wanted, or will come

Every message names the handoff, its attempt and the sender's incarnation. Nothing here is ever unpickled.
"""

from struct import Struct
from typing import Annotated, TypeAlias

import msgspec

from handoff.checksum import Checksums

PROTOCOL_VERSION = 4
MAX_FRAME_BYTES = 1 << 20
MAX_SEGMENTS = 1 << 16
"""Of one transfer. A source that is about to run out of them waits for the end of its prefill with the last one."""

_MAGIC = b"PRLY"
_HEADER = Struct("<4sH")

_Id: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**40)]
_Channel: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
_Digest: TypeAlias = Annotated[str, msgspec.Meta(max_length=128)]
_Reason: TypeAlias = Annotated[str, msgspec.Meta(max_length=500)]
_Blocks: TypeAlias = Annotated[tuple[_Count, ...], msgspec.Meta(max_length=200_000)]

Layers: TypeAlias = tuple[Annotated[int, msgspec.Meta(ge=0, lt=2**16)], Annotated[int, msgspec.Meta(ge=0, lt=2**16)]]
"""[first, end)."""


class WireError(ValueError):
    """A frame that can't be understood; it is dropped and its sender is at fault."""


class Offer(msgspec.Struct, frozen=True, tag="offer", forbid_unknown_fields=True):
    """The source will send the KV of `prompt_tokens` positions.

    adapter: digest of the request's LoRA adapter at the source, empty for the base model. checksums: how those of the
    segments are made.
    """

    handoff_id: _Id
    attempt: _Count
    incarnation: _Count
    request_id: _Id
    compatibility: _Id
    prompt_tokens: _Count
    adapter: _Digest = ""
    checksums: Checksums = "sampled"


class Accept(msgspec.Struct, frozen=True, tag="accept", forbid_unknown_fields=True):
    """The destination has its first `cached_tokens` positions; the others are to land in `blocks`.

    channel: of the first segment; each takes the next one. segment_blocks: how many blocks of the source a segment may
    have at most, 0 for any number.
    """

    handoff_id: _Id
    attempt: _Count
    incarnation: _Count
    channel: _Channel
    cached_tokens: _Count
    blocks: _Blocks
    segment_blocks: _Count = 0


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the next token needs besides KV. first_token: sampled by the source; adapter: as in the offer."""

    first_token: _Count
    adapter: _Digest = ""


class Segment(msgspec.Struct, frozen=True, tag="segment", forbid_unknown_fields=True):
    """The source sends its `blocks`, which hold the prompt's blocks from `first_block` on; with the record also, where
    the model has recurrent state, what its slot holds.

    number: 0, 1, ... checksum: of the content, see handoff/checksum.py; 0 where none is made. layers: those of
    the blocks that this segment carries; None for all of them.
    """

    handoff_id: _Id
    attempt: _Count
    incarnation: _Count
    number: Annotated[int, msgspec.Meta(ge=0, lt=MAX_SEGMENTS)]
    first_block: _Count
    blocks: _Blocks
    checksum: Annotated[int, msgspec.Meta(ge=0)] = 0
    record: Record | None = None
    layers: Layers | None = None


class Cease(msgspec.Struct, frozen=True, tag="cease", forbid_unknown_fields=True):
    """From the source: no segment follows. From the destination: none is wanted; it takes those that are on the way."""

    handoff_id: _Id
    attempt: _Count
    incarnation: _Count
    reason: _Reason


class Refuse(msgspec.Struct, frozen=True, tag="refuse", forbid_unknown_fields=True):
    """The destination takes nothing; the source's memory is quiet."""

    handoff_id: _Id
    attempt: _Count
    incarnation: _Count
    reason: _Reason


Message: TypeAlias = Offer | Accept | Refuse | Segment | Cease

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Raises WireError for a message over MAX_FRAME_BYTES."""
    frame = _HEADER.pack(_MAGIC, PROTOCOL_VERSION) + _encoder.encode(message)
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError(f"a {type(message).__name__} of {len(frame)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return frame


def decode(frame: bytes) -> Message:
    """Raises WireError, saying what is wrong with the frame."""
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {len(frame)} bytes is over the limit of {MAX_FRAME_BYTES}")
    if len(frame) < _HEADER.size:
        raise WireError(f"a frame of {len(frame)} bytes is shorter than its header")
    magic, version = _HEADER.unpack_from(frame)
    if magic != _MAGIC:
        raise WireError(f"a frame starts with {magic!r}, not with {_MAGIC!r}")
    if version != PROTOCOL_VERSION:
        raise WireError(f"a frame speaks version {version}, this node speaks {PROTOCOL_VERSION}")
    try:
        return _decoder.decode(memoryview(frame)[_HEADER.size :])
    except msgspec.MsgspecError as error:
        raise WireError(f"a frame's content is wrong: {error}") from error
