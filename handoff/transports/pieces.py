"""What all transports share: checks of what callers post, the pool's size, running a callback."""

from collections.abc import Sequence
from typing import Any

import structlog

from handoff.transports.base import MAX_MESSAGE_BYTES, Done, Piece, TransferError

log = structlog.get_logger()

CHANNELS = 1 << 32


def pool_bytes(pool: Any) -> int:
    """Size of a pool of flat bytes. Raises TypeError when it isn't one-dimensional, uint8 and contiguous."""
    interface = getattr(pool, "__cuda_array_interface__", None) or getattr(pool, "__array_interface__", None)
    if interface is None:
        raise TypeError(f"a pool is a numpy array or has __cuda_array_interface__; got {type(pool).__name__}")
    shape, strides = interface["shape"], interface.get("strides")
    if len(shape) != 1 or interface["typestr"] != "|u1" or strides not in (None, (1,)):
        raise TypeError(f"a pool is flat, contiguous uint8; got shape {shape}, type {interface['typestr']}")
    if interface["data"][1]:
        raise TypeError("a pool must be writable")
    return int(shape[0])


def check_pieces(channel: int, pieces: Sequence[Piece], pool_size: int) -> None:
    """Raises ValueError when the channel or a piece is out of range, or when there's no piece."""
    if not 0 <= channel < CHANNELS:
        raise ValueError(f"channel {channel} is not in 0..2**32-1")
    if not pieces:
        raise ValueError(f"no pieces were posted on channel {channel}")
    for piece in pieces:
        if piece.length <= 0 or piece.offset < 0 or piece.offset + piece.length > pool_size:
            raise ValueError(f"{piece} is empty or reaches outside the pool of {pool_size} bytes")


def check_frame(frame: bytes) -> None:
    """Raises ValueError when the message is empty or longer than MAX_MESSAGE_BYTES."""
    if not 0 < len(frame) <= MAX_MESSAGE_BYTES:
        raise ValueError(f"a message has 1..{MAX_MESSAGE_BYTES} bytes; this one has {len(frame)}")


def run_callback(done: Done, error: TransferError | None) -> None:
    """Run a callback; its exceptions must not end the transport's thread."""
    try:
        done(error)
    except Exception:
        log.exception("a transfer's callback raised")
