"""What a sender announces on the lane of shared pools: where its pieces lie in its pool. Pure.

A long list takes several frames, which arrive in order.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from handoff.transports.base import Piece

FRAME_PIECES = 16384
_HEAD = struct.Struct("<4sIIQ")
_MAGIC = b"PLO1"

MAX_PART_BYTES = _HEAD.size + 16 * FRAME_PIECES
MAX_PIECES = 1 << 24
"""Of one operation."""

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class OfferPart:
    """Pieces of the operation on `channel`, which has `total` of them; offsets, lengths: int64 [pieces], in bytes.

    number: the sender's, of its connection to the receiver.
    """

    channel: int
    number: int
    total: int
    offsets: Numbers
    lengths: Numbers

    def pack(self) -> bytes:
        head = _HEAD.pack(_MAGIC, self.channel, self.number, self.total)
        return head + self.offsets.tobytes() + self.lengths.tobytes()

    @staticmethod
    def unpack(data: bytes) -> "OfferPart":
        """Raises ValueError when the bytes are no part of an offer of this version."""
        count, rest = divmod(len(data) - _HEAD.size, 16)
        if count < 1 or rest or data[:4] != _MAGIC:
            raise ValueError("not an offer of a UCX transport of this version of Prelay")
        _, channel, number, total = _HEAD.unpack_from(data)
        if count > FRAME_PIECES or not count <= total <= MAX_PIECES:
            raise ValueError(f"an offer of {total} pieces with {count} of them in one part")
        numbers = np.frombuffer(data, np.int64, 2 * count, _HEAD.size)
        return OfferPart(channel, number, total, numbers[:count], numbers[count:])


def columns(pieces: Sequence[Piece]) -> tuple[Numbers, Numbers]:
    """Offsets and lengths."""
    offsets = np.fromiter(map(attrgetter("offset"), pieces), np.int64, len(pieces))
    return offsets, np.fromiter(map(attrgetter("length"), pieces), np.int64, len(pieces))


def parts_of(channel: int, number: int, offsets: Numbers, lengths: Numbers) -> Iterator[OfferPart]:
    for first in range(0, len(offsets), FRAME_PIECES):
        part = slice(first, first + FRAME_PIECES)
        yield OfferPart(channel, number, len(offsets), offsets[part], lengths[part])


class Offer:
    """The parts of one operation that have arrived."""

    def __init__(self, first: OfferPart) -> None:
        self.channel, self.number, self._total = first.channel, first.number, first.total
        self._parts = [first]
        self._count = len(first.offsets)

    def add(self, part: OfferPart) -> None:
        """Raises ValueError for a part of something else."""
        if (part.number, part.total) != (self.number, self._total) or self._count + len(part.offsets) > self._total:
            raise ValueError(f"channel {self.channel}: a part of another offer before the last one was complete")
        self._parts.append(part)
        self._count += len(part.offsets)

    @property
    def complete(self) -> bool:
        return self._count >= self._total

    @property
    def offsets(self) -> Numbers:
        return np.concatenate([part.offsets for part in self._parts])

    @property
    def lengths(self) -> Numbers:
        return np.concatenate([part.lengths for part in self._parts])
