"""What two nodes say to each other around a transfer: MessagePack, framed, versioned, size-limited, checked.

    frame    magic "PRLY" | version u16 LE | MessagePack map with a "type"

    source   Offer   ----------------->  destination     what I hold, and the record: first token, counts
             <-----------------  Accept | Refuse         receives are posted: these blocks, on this channel
             pieces  ----------------->

Every message names the handoff, its attempt and the sender's incarnation. Nothing here is ever unpickled.
"""

from struct import Struct
from typing import Annotated, TypeAlias

import msgspec

PROTOCOL_VERSION = 2
MAX_FRAME_BYTES = 1 << 20

_MAGIC = b"PRLY"
_HEADER = Struct("<4sH")

_Id: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**40)]
_Channel: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
_Blocks: TypeAlias = Annotated[tuple[_Count, ...], msgspec.Meta(max_length=200_000)]


class WireError(ValueError):
    """A frame that can't be understood; it is dropped and its sender is at fault."""


class Offer(msgspec.Struct, frozen=True, tag="offer", forbid_unknown_fields=True):
    """The source is ready to send. blocks: the prompt's blocks in the source's pool; first_token: already sampled.

    adapter: digest of the request's LoRA adapter at the source, empty for the base model.
    """

    handoff_id: _Id
    attempt: _Count
    incarnation: _Count
    request_id: _Id
    compatibility: _Id
    prompt_tokens: _Count
    first_token: _Count
    blocks: _Blocks
    adapter: Annotated[str, msgspec.Meta(max_length=128)] = ""


class Accept(msgspec.Struct, frozen=True, tag="accept", forbid_unknown_fields=True):
    """The destination has posted receives: for its blocks for the offer's blocks from `first_block` on, then, where the
    model has recurrent state, for the record of the slot.
    """

    handoff_id: _Id
    attempt: _Count
    incarnation: _Count
    channel: _Channel
    first_block: _Count
    blocks: _Blocks


class Refuse(msgspec.Struct, frozen=True, tag="refuse", forbid_unknown_fields=True):
    """The destination takes nothing; the source's memory is quiet."""

    handoff_id: _Id
    attempt: _Count
    incarnation: _Count
    reason: Annotated[str, msgspec.Meta(max_length=500)]


Message: TypeAlias = Offer | Accept | Refuse

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
