"""What UCX transports say to each other beneath messages and pieces: tags, addresses and hellos. Pure.

Who may speak at all, and how a frame proves it: `ucx_seal`.

UCX matches tags per worker, not per endpoint, so a tag says for whom it is:

    bit 63      frame: a message or a hello; clear for pieces
    bit 62      hello
    bits 32-61  number: the receiver's number for this connection (0 in hellos)
    bits 0-31   channel; in frames 0 for a message and a hello, 1 for a note, 2 for an offer

The receiver gives each connection a number of its own that it never uses again, and tells it in a hello. So a
number names the peer, and what is still under way from a connection that was given up matches nothing.

    A: Hello(number=a, seen=0)  ->                                     connect at A
                                <-  B: Hello(number=b, seen=0)         connect at B
    A: Hello(number=a, seen=b)  ->  B is open: it sends to number a
                                <-  B: Hello(number=b, seen=a)         A is open: it sends to number b

A side opens only by a hello that has seen its current number: an older one may name a number that the peer has
given up since. Each hello also bears a nonce, which its sender drew for this number, and repeats that of the number it
has seen; a side opens only when its own comes back, so no recorded hello opens anything. An open side never moves on to
another number by itself: a peer that says hello with a newer number has given up this connection, so it's over for
both, and waits for this side's own `connect`.

A note is what one transport tells the other beneath the messages: see `Tell`. An offer: see `ucx_offer`.
"""

import struct
from dataclasses import dataclass
from enum import Enum, IntEnum, auto

from handoff.transports.ucx_seal import MAC_BYTES, NONCE_BYTES, ClusterKey, Opener, Sealer

FRAME_BIT = 1 << 63
HELLO_BIT = 1 << 62
NUMBER_SHIFT = 32
NUMBER_BITS = 30
NUMBER_MASK = ((1 << NUMBER_BITS) - 1) << NUMBER_SHIFT
HELLO_TAG = FRAME_BIT | HELLO_BIT
NOTE = 1
OFFER = 2

IDENTITY_BYTES = 8
HOST_BYTES = 16
_ADDRESS = struct.Struct(f"<4s{IDENTITY_BYTES}s{HOST_BYTES}s")
_PLACE = struct.Struct("<IIQQIQQQ")
_HELLO = struct.Struct(f"<4s{IDENTITY_BYTES}s{IDENTITY_BYTES}sII?{NONCE_BYTES}s{NONCE_BYTES}s")
_PARTY = struct.Struct(f"<{IDENTITY_BYTES}sI{NONCE_BYTES}s")
_NOTE = struct.Struct("<BIQ")
_ADDRESS_MAGIC = b"PLA4"
_HELLO_MAGIC = b"PLH3"
HELLO_BYTES = _HELLO.size + MAC_BYTES
NOTE_BYTES = _NOTE.size
NO_NONCE = bytes(NONCE_BYTES)


def piece_tag(number: int, channel: int) -> int:
    return number << NUMBER_SHIFT | channel


def message_tag(number: int) -> int:
    return FRAME_BIT | number << NUMBER_SHIFT


def note_tag(number: int) -> int:
    return message_tag(number) | NOTE


def offer_tag(number: int) -> int:
    return message_tag(number) | OFFER


def is_offer(tag: int) -> bool:
    """Of a frame that is no hello."""
    return bool(tag & OFFER)


def is_note(tag: int) -> bool:
    """Of a frame that is no hello."""
    return bool(tag & NOTE)


def number_of(tag: int) -> int:
    return (tag & NUMBER_MASK) >> NUMBER_SHIFT


def next_number(number: int) -> int:
    """The number after `number`; never 0."""
    return number % ((1 << NUMBER_BITS) - 1) + 1


def is_newer(number: int, than: int) -> bool:
    """Numbers grow and start again at 1: the shorter way round decides."""
    return 0 < (number - than) % (1 << NUMBER_BITS) < 1 << (NUMBER_BITS - 1)


@dataclass(frozen=True, slots=True)
class PoolPlace:
    """Where a pool in host memory is: in process `pid` at `address`, `size` bytes.

    control_fd: that process's descriptor of the transport's control file.
    fd, device, inode, offset: of a pool in shared memory: a descriptor of its file, what `fstat` says of that, and
    where the pool begins in it; all 0 for private memory.
    """

    pid: int
    control_fd: int
    address: int
    size: int
    fd: int = 0
    device: int = 0
    inode: int = 0
    offset: int = 0

    @property
    def is_file(self) -> bool:
        return self.inode != 0

    def pack(self) -> bytes:
        file = (self.fd, self.device, self.inode, self.offset)
        return _PLACE.pack(self.pid, self.control_fd, self.address, self.size, *file)


@dataclass(frozen=True, slots=True)
class Address:
    """identity: random, one per started transport. host: equal on one running machine. worker: UCX's address.

    place: of the pool; None if peers are not to read it by themselves.
    """

    identity: bytes
    host: bytes
    worker: bytes
    place: PoolPlace | None = None

    def pack(self) -> bytes:
        place = self.place.pack() if self.place else bytes(_PLACE.size)
        return _ADDRESS.pack(_ADDRESS_MAGIC, self.identity, self.host) + place + self.worker

    @staticmethod
    def unpack(data: bytes) -> "Address":
        """Raises ValueError when the bytes are no address of this version."""
        if len(data) <= _ADDRESS.size + _PLACE.size or data[:4] != _ADDRESS_MAGIC:
            raise ValueError("not an address of a UCX transport of this version of Prelay")
        _, identity, host = _ADDRESS.unpack_from(data)
        place = PoolPlace(*_PLACE.unpack_from(data, _ADDRESS.size))
        return Address(identity, host, data[_ADDRESS.size + _PLACE.size :], place if place.pid else None)


@dataclass(frozen=True, slots=True)
class Hello:
    """identity: the sender's. receiver: the identity of the transport that it is for.

    number: to be used towards the sender. seen: the receiver's number, 0 if unknown. nonce: the sender's for this
    number. echo: the receiver's for the number that was seen. reads: the sender copies from the receiver's pool by
    itself; alike in all hellos with one number.
    """

    identity: bytes
    receiver: bytes
    number: int
    seen: int
    nonce: bytes
    echo: bytes = NO_NONCE
    reads: bool = False

    def pack(self, key: ClusterKey) -> bytes:
        """With the proof that its sender has the key."""
        fields = (self.identity, self.receiver, self.number, self.seen, self.reads, self.nonce, self.echo)
        hello = _HELLO.pack(_HELLO_MAGIC, *fields)
        return hello + key.proof(hello)

    @staticmethod
    def unpack(data: bytes) -> "Hello":
        """Proves nothing yet. Raises ValueError when the bytes are no hello of this version."""
        if len(data) != HELLO_BYTES or data[:4] != _HELLO_MAGIC:
            raise ValueError("not a hello of a UCX transport of this version of Prelay")
        _, identity, receiver, number, seen, reads, nonce, echo = _HELLO.unpack_from(data)
        return Hello(identity, receiver, number, seen, nonce, echo, reads)


def check_hello(data: bytes, key: ClusterKey) -> None:
    """Raises NotAuthentic when what `Hello.unpack` takes was not made with the key."""
    key.check(data[_HELLO.size :], data[: _HELLO.size])


class Tell(IntEnum):
    """PING: are you there? PONG: yes. LANDED: the first `count` pieces on `channel` are here. SENT, FAILED: the
    sender's operation on `channel` has ended; its memory was in place until now. TAKEN, REFUSED: the receiver has
    copied what was offered on `channel`, or can't."""

    PING = 1
    PONG = 2
    LANDED = 3
    SENT = 4
    FAILED = 5
    TAKEN = 6
    REFUSED = 7


@dataclass(frozen=True, slots=True)
class Note:
    tell: Tell
    channel: int = 0
    count: int = 0

    def pack(self) -> bytes:
        return _NOTE.pack(self.tell, self.channel, self.count)

    @staticmethod
    def unpack(data: bytes) -> "Note":
        """Raises ValueError when the bytes are no note of this version."""
        if len(data) != _NOTE.size:
            raise ValueError("not a note of a UCX transport of this version of Prelay")
        tell, channel, count = _NOTE.unpack(data)
        return Note(Tell(tell), channel, count)


class Heed(Enum):
    """What a hello asks of the side that got it. ANSWER and OPEN_AND_ANSWER: say hello with the number it names."""

    IGNORE = auto()
    ANSWER = auto()
    OPEN = auto()
    OPEN_AND_ANSWER = auto()
    SUPERSEDED = auto()


class Pairing:
    """Two numbers that belong together: ours, and the peer's once a hello has opened this side.

    nonce: drawn at random for this pairing.
    """

    def __init__(self, number: int, nonce: bytes) -> None:
        self.number = number
        self.nonce = nonce
        self.peer_number: int | None = None
        self.peer_reads = False
        """Valid once open: the peer copies from our pool by itself."""
        self._peer_nonce = NO_NONCE
        self._answered: int | None = None

    @property
    def is_open(self) -> bool:
        return self.peer_number is not None

    def heed(self, hello: Hello) -> Heed:
        """Take an authentic hello of the peer into account."""
        newer = self._answered is None or is_newer(hello.number, self._answered)
        if newer and self.is_open:
            return Heed.SUPERSEDED
        if not newer and hello.number != self._answered:
            return Heed.IGNORE
        opens = (hello.seen, hello.echo) == (self.number, self.nonce) and not self.is_open
        if opens:
            self.peer_number = hello.number
            self.peer_reads = hello.reads
            self._peer_nonce = hello.nonce
        self._answered = hello.number
        if newer:
            return Heed.OPEN_AND_ANSWER if opens else Heed.ANSWER
        return Heed.OPEN if opens else Heed.IGNORE

    def seals(self, key: ClusterKey, own: bytes, peer: bytes) -> tuple[Sealer, Opener]:
        """For what leaves and what comes on this pairing, which is open. own, peer: identities."""
        assert self.peer_number is not None
        us = _PARTY.pack(own, self.number, self.nonce)
        them = _PARTY.pack(peer, self.peer_number, self._peer_nonce)
        return Sealer(key.session(us, them)), Opener(key.session(them, us))
