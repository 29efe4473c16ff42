"""The transport protocol: messages and pieces of a registered pool, between nodes.

One transport belongs to one node and owns one thread. Calls come from any thread and return at once; they are
performed in order. Callbacks run on the transport's thread, must not block, and are called exactly once for every
posted operation, whatever happens: that is how each side knows by itself that its memory is quiet.

A posted receive writes into the pool until its callback has run. After `disconnect(peer)` every pending operation
with that peer ends with PeerLost, and nothing of that peer touches the pool any more.

The same happens without a `disconnect` to a peer that dies, stops or closes while operations with it are pending: the
transport notices it by itself, within a bound (`liveness.PEER_SILENCE_S` between processes). A receive succeeds only
if the sender kept its bytes in place to the end. Long operations share the way with those posted behind them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

MAX_MESSAGE_BYTES = 1 << 20
"""Longest message that `send_message` takes; longer ones are a bug of the caller."""


@dataclass(frozen=True, slots=True)
class Piece:
    """`length` bytes of the registered pool from byte `offset`."""

    offset: int
    length: int


class TransferError(RuntimeError):
    """An operation on the transport ended without success; its memory is quiet."""


class PeerLost(TransferError):
    """The peer was disconnected, died or was never connected."""


@dataclass(frozen=True, slots=True)
class Link:
    """How two nodes are joined: `lane` names what carries bulk bytes ("memory", "shm", "cma", "tcp", ...)."""

    peer: str
    lane: str
    warning: str | None = None


Done: TypeAlias = Callable[[TransferError | None], None]
OnMessage: TypeAlias = Callable[[str, bytes], None]
"""(peer, frame): a message arrived. Frames of one peer arrive in the order they were sent."""


class Transport(Protocol):
    """See the module's docstring for threads and ordering."""

    @property
    def name(self) -> str:
        """ "memory", "ucx", ..."""
        ...

    @property
    def address(self) -> bytes:
        """What a peer passes to `connect`; valid after `start`, opaque, fits in a message."""
        ...

    def start(self, node: str, pool: Any, on_message: OnMessage) -> None:
        """Register the pool, once, and start the thread.

        node: this node's name; the `peer` that other nodes see.
        pool: flat bytes: a writable one-dimensional uint8 numpy array, or an object with
        `__cuda_array_interface__`.
        """
        ...

    def connect(self, peer: str, address: bytes) -> None:
        """Reach `peer` at `address`; both sides connect to each other before either sends.

        A second call for the same peer replaces the first (a restarted peer).
        """
        ...

    def disconnect(self, peer: str) -> None:
        """Give the peer up. Its pending operations end with PeerLost. Unknown peers are ignored."""
        ...

    def send_message(self, peer: str, frame: bytes) -> None:
        """Send a small message. A message to an unknown or lost peer is dropped, and logged."""
        ...

    def post_send(self, peer: str, channel: int, pieces: Sequence[Piece], done: Done) -> None:
        """Send pieces, in order, on `channel` (0 <= channel < 2**32).

        The receiver posts the same number of pieces with the same lengths on the same channel. A channel is
        chosen by the receiver and is unique among its pending operations.
        """
        ...

    def post_receive(self, peer: str, channel: int, pieces: Sequence[Piece], done: Done) -> None:
        """Receive pieces straight into the pool. See `post_send`."""
        ...

    def links(self) -> list[Link]:
        """The lane to each connected peer, as last known."""
        ...

    def close(self) -> None:
        """Disconnect all, stop the thread (bounded wait), free what was registered. Idempotent."""
        ...
