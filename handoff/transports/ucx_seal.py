"""Who may speak on the data plane: proofs of the cluster's secret in hellos, and seals on frames. Pure.

    key      of the cluster: a hash of its secret; it never travels
    hello    proof = MAC(key, hello), and the hello names its receiver. A connection opens only by a hello that repeats
             the random nonce which this side drew for it, so one that was recorded opens nothing, here or elsewhere
    session  key of one direction of one connection = MAC(key, identity, number and nonce of the sender, then of the
             receiver)
    frame    count | MAC(session key of its sender, count | tag | content) | content

Why frames are sealed as well: a hello proves who was there at the beginning. The number of a connection, which all its
frames bear, has 30 bits and is readable on the wire, so whoever reaches the port could add frames of its own to an open
connection. A seal costs about a microsecond, a frame some twenty. The tag is part of it: a note can't be
passed off as a message. The count refuses frames that are repeated or swapped, and tells when one is missing.

Nothing is encrypted. The bytes of pieces bear no seal: each Segment, which does, has their checksum.
"""

from hashlib import blake2b
from hmac import compare_digest
from struct import Struct
from typing import Final

NONCE_BYTES: Final = 16
MAC_BYTES: Final = 16
_COUNT: Final = Struct("<Q")
_COUNTED: Final = Struct("<QQ")
SEAL_BYTES: Final = _COUNT.size + MAC_BYTES
"""Before the content of every frame but a hello."""


class NotAuthentic(ValueError):
    """Not made by one who has the secret, or for another place in the stream: to be dropped."""


class FramesMissing(NotAuthentic):
    """An authentic frame, but others before it never came: the connection is of no use any more."""


class ClusterKey:
    """secret: of any length; an empty one keeps nobody out (tests, benchmarks)."""

    __slots__ = ("_key",)

    def __init__(self, secret: bytes) -> None:
        self._key = blake2b(secret, digest_size=32, person=b"prelay cluster").digest()

    def __repr__(self) -> str:
        return "ClusterKey(...)"

    def proof(self, hello: bytes) -> bytes:
        """MAC_BYTES that only who has the secret can make."""
        return blake2b(hello, key=self._key, digest_size=MAC_BYTES, person=b"prelay hello").digest()

    def check(self, proof: bytes, hello: bytes) -> None:
        """Raises NotAuthentic."""
        if not compare_digest(proof, self.proof(hello)):
            raise NotAuthentic("its proof of the cluster's secret is wrong")

    def session(self, sender: bytes, receiver: bytes) -> bytes:
        """Key of one direction. sender, receiver: what tells this connection of each from all others, of equal size."""
        return blake2b(sender + receiver, key=self._key, digest_size=32, person=b"prelay session").digest()


class Sealer:
    """Seals what leaves, in the order in which it leaves."""

    __slots__ = ("_count", "_mac")

    def __init__(self, session: bytes) -> None:
        self._mac = blake2b(key=session, digest_size=MAC_BYTES, person=b"prelay frame")
        self._count = 0

    def seal(self, tag: int, content: bytes) -> bytes:
        self._count += 1
        mac = self._mac.copy()
        mac.update(_COUNTED.pack(self._count, tag))
        mac.update(content)
        return b"".join((_COUNT.pack(self._count), mac.digest(), content))


class Opener:
    """Opens what has come, in the order in which it came."""

    __slots__ = ("_count", "_mac")

    def __init__(self, session: bytes) -> None:
        self._mac = blake2b(key=session, digest_size=MAC_BYTES, person=b"prelay frame")
        self._count = 0

    def open(self, tag: int, frame: memoryview) -> bytes:
        """The content. Raises NotAuthentic, and FramesMissing where the frame is in order but others are lost."""
        if len(frame) < SEAL_BYTES:
            raise NotAuthentic(f"a frame of {len(frame)} bytes has no room for its seal")
        (count,) = _COUNT.unpack_from(frame)
        content = frame[SEAL_BYTES:]
        mac = self._mac.copy()
        mac.update(_COUNTED.pack(count, tag))
        mac.update(content)
        if not compare_digest(mac.digest(), frame[_COUNT.size : SEAL_BYTES]):
            raise NotAuthentic("its seal is wrong")
        if count <= self._count:
            raise NotAuthentic(f"frame {count} came again, after {self._count}")
        if count > self._count + 1:
            raise FramesMissing(f"frame {count} came after {self._count}")
        self._count = count
        return bytes(content)
