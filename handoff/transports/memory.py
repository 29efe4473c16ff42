"""The memory transport: nodes of one process, joined by a fabric that they share.

Each transport has a thread and an ordered queue. The receiver's thread copies, one piece per turn, between the two
pools once both sides have posted. Like with UCX, the receiver numbers each connection, so what is still under way
from a connection that was given up lands nowhere.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import structlog

from handoff.transports.base import Done, Link, OnMessage, PeerLost, Piece, TransferError
from handoff.transports.pieces import check_frame, check_pieces, pool_bytes, run_callback

log = structlog.get_logger()

CLOSE_TIMEOUT_S = 10.0

_Command: TypeAlias = Callable[[], None]
_Delivery: TypeAlias = Callable[["MemoryTransport", int], None]
"""Hands something to a transport, under the number that it gave to the connection."""


class MemoryFabric:
    """What joins the transports of one process. `hold` stops bulk copies in the middle, for tests."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._transports: dict[bytes, MemoryTransport] = {}
        self._numbers: dict[tuple[bytes, bytes], int] = {}
        self._last_number = 0
        self._allowance: int | None = None
        self._held = threading.Event()

    def hold(self, after_pieces: int = 0) -> None:
        """Let `after_pieces` more pieces through in the whole fabric, then stop all copies until `release`."""
        with self._lock:
            self._allowance = after_pieces
            self._held.clear()

    def wait_held(self, timeout_s: float) -> bool:
        """Wait until a copy has been stopped; False after the timeout."""
        return self._held.wait(timeout_s)

    def release(self) -> None:
        with self._lock:
            self._allowance = None
        self._poke_all()

    def _poke_all(self) -> None:
        with self._lock:
            transports = list(self._transports.values())
        for transport in transports:
            transport.poke()

    def holds(self, address: bytes) -> bool:
        with self._lock:
            return address in self._transports

    def join(self, transport: "MemoryTransport") -> bytes:
        """The transport's address in the fabric."""
        with self._lock:
            self._last_number += 1
            address = f"memory-{self._last_number}".encode()
            self._transports[address] = transport
            return address

    def leave(self, address: bytes) -> None:
        with self._lock:
            self._transports.pop(address, None)
        self._poke_all()

    def open(self, owner: bytes, peer: bytes) -> int:
        """A new number for what `owner` takes from `peer`."""
        with self._lock:
            self._last_number += 1
            self._numbers[owner, peer] = self._last_number
            return self._last_number

    def poke(self, address: bytes) -> None:
        transport = self._transports.get(address)
        if transport is not None:
            transport.poke()

    def shut(self, owner: bytes, peer: bytes) -> None:
        with self._lock:
            self._numbers.pop((owner, peer), None)

    def reach(self, owner: bytes, peer: bytes) -> "tuple[MemoryTransport, int] | None":
        """The transport at `owner` and its number for `peer`; None while it hasn't connected to `peer`."""
        with self._lock:
            transport, number = self._transports.get(owner), self._numbers.get((owner, peer))
            return None if transport is None or number is None else (transport, number)

    def allow_piece(self) -> bool:
        with self._lock:
            if self._allowance == 0:
                self._held.set()
                return False
            if self._allowance is not None:
                self._allowance -= 1
            return True


class _Send:
    """A posted send. Both threads use it under its lock: once it has ended, its bytes are not read any more."""

    def __init__(self, sender: "MemoryTransport", pieces: Sequence[Piece], done: Done) -> None:
        self.sender = sender
        self.pieces = tuple(pieces)
        self.done = done
        self.ended = False
        self.lock = threading.Lock()

    def end(self) -> bool:
        """True for the one caller that ends it, and so owes the callback."""
        with self.lock:
            first, self.ended = not self.ended, True
            return first


@dataclass(slots=True)
class _Receive:
    pieces: tuple[Piece, ...]
    done: Done
    copied: int = 0


@dataclass(slots=True)
class _Peer:
    """number: ours, for what comes from the peer. waiting: what the peer hasn't connected for yet, in order."""

    name: str
    address: bytes
    number: int
    sends: list[_Send] = field(default_factory=list)
    waiting: deque[_Delivery] = field(default_factory=deque)
    offers: dict[int, deque[_Send]] = field(default_factory=dict)
    receives: dict[int, deque[_Receive]] = field(default_factory=dict)


class MemoryTransport:
    """A `Transport` in one process. After `close`, what is posted ends with PeerLost on the caller's thread."""

    name = "memory"

    def __init__(self, fabric: MemoryFabric) -> None:
        self._fabric = fabric
        self._queue: queue.SimpleQueue[tuple[_Command, Done | None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._peers: dict[str, _Peer] = {}
        self._address = b""
        self._addresses: dict[str, bytes] = {}
        self._pool: Any = None
        self._pool_size = 0

    @property
    def address(self) -> bytes:
        return self._address

    def start(self, node: str, pool: Any, on_message: OnMessage) -> None:
        """Raises TypeError for a pool that isn't flat host bytes."""
        if self._thread is not None:
            raise RuntimeError("a transport starts once")
        if hasattr(pool, "__cuda_array_interface__"):
            raise TypeError("the memory transport moves host memory only; use ucx for device memory")
        self._pool, self._pool_size = pool, pool_bytes(pool)
        self._on_message = on_message
        self._address = self._fabric.join(self)
        self._thread = threading.Thread(target=self._run, name=f"memory-{node}", daemon=True)
        self._thread.start()

    def connect(self, peer: str, address: bytes) -> None:
        with self._lock:
            self._forget(peer)
            self._addresses[peer] = address
            # Now and not in its turn: who is told that we've connected may send at once.
            number = self._fabric.open(self._address, address)
            self._submit_locked(lambda: self._connect(peer, address, number))
        self._fabric.poke(address)

    def disconnect(self, peer: str) -> None:
        with self._lock:
            self._forget(peer)
            self._submit_locked(lambda: self._lose(peer, f"{peer} was disconnected"))

    def send_message(self, peer: str, frame: bytes) -> None:
        check_frame(frame)
        self._submit(lambda: self._send_message(peer, frame))

    def post_send(self, peer: str, channel: int, pieces: Sequence[Piece], done: Done) -> None:
        check_pieces(channel, pieces, self._pool_size)
        self._submit(lambda: self._post_send(peer, channel, pieces, done), done)

    def post_receive(self, peer: str, channel: int, pieces: Sequence[Piece], done: Done) -> None:
        check_pieces(channel, pieces, self._pool_size)
        self._submit(lambda: self._post_receive(peer, channel, pieces, done), done)

    def links(self) -> list[Link]:
        with self._lock:
            return [Link(peer, "memory") for peer in self._addresses]

    def close(self) -> None:
        self._stopping = True
        self.poke()
        if self._thread is None or self._thread is threading.current_thread():
            return
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            log.error("the memory transport's thread did not stop", seconds=CLOSE_TIMEOUT_S)

    def poke(self) -> None:
        """Make the thread look again at what it can do."""
        self._submit(lambda: None)

    def _submit(self, run: _Command, done: Done | None = None) -> None:
        with self._lock:
            if self._submit_locked(run, done):
                return
        _refuse(done)

    def _submit_locked(self, run: _Command, done: Done | None = None) -> bool:
        if not self._closed:
            self._queue.put((run, done))
        return not self._closed

    def _forget(self, peer: str) -> None:
        address = self._addresses.pop(peer, None)
        if address is not None:
            self._fabric.shut(self._address, address)

    def take_message(self, number: int, frame: bytes) -> None:
        """For other transports: a message for the connection that has this number."""
        self._submit(lambda: self._deliver(number, frame))

    def take_offer(self, number: int, channel: int, send: _Send) -> None:
        """For other transports: a posted send for the connection that has this number."""
        self._submit(lambda: self._offer(number, channel, send))

    # On the transport's thread from here on.

    def _run(self) -> None:
        try:
            self._loop()
        except Exception:
            log.exception("the memory transport's thread failed; the transport closes")
        self._shut()

    def _loop(self) -> None:
        copying = False
        while not self._stopping:
            if not copying or not self._queue.empty():
                self._queue.get()[0]()
            self._flush()
            copying = self._copy_pieces()

    def _shut(self) -> None:
        for name in list(self._peers):
            self._lose(name, "the transport was closed")
        with self._lock:
            self._closed = True
            for name in list(self._addresses):
                self._forget(name)
        self._fabric.leave(self._address)
        while not self._queue.empty():
            _refuse(self._queue.get()[1])

    def _connect(self, name: str, address: bytes, number: int) -> None:
        self._lose(name, f"{name} was connected anew")
        self._peers[name] = _Peer(name, address, number)

    def _lose(self, name: str, reason: str) -> None:
        peer = self._peers.pop(name, None)
        if peer is None:
            return
        error = PeerLost(reason)
        receives = [receive for posted in peer.receives.values() for receive in posted]
        sends = [send for send in peer.sends if send.end()]
        for done in [*(receive.done for receive in receives), *(send.done for send in sends)]:
            run_callback(done, error)

    def _send_message(self, name: str, frame: bytes) -> None:
        peer = self._peers.get(name)
        if peer is None:
            log.warning("message dropped: its peer is not connected", peer=name, length=len(frame))
            return
        peer.waiting.append(lambda receiver, number: receiver.take_message(number, frame))

    def _post_send(self, name: str, channel: int, pieces: Sequence[Piece], done: Done) -> None:
        peer = self._peers.get(name)
        if peer is None:
            run_callback(done, PeerLost(f"{name} is not connected"))
            return
        send = _Send(self, pieces, done)
        peer.sends = [other for other in peer.sends if not other.ended]
        peer.sends.append(send)
        peer.waiting.append(lambda receiver, number: receiver.take_offer(number, channel, send))

    def _post_receive(self, name: str, channel: int, pieces: Sequence[Piece], done: Done) -> None:
        peer = self._peers.get(name)
        if peer is None:
            run_callback(done, PeerLost(f"{name} is not connected"))
            return
        peer.receives.setdefault(channel, deque()).append(_Receive(tuple(pieces), done))

    def _flush(self) -> None:
        """Pass on what waited for peers that have connected to us by now."""
        for peer in list(self._peers.values()):
            if (peer.receives or peer.sends) and not self._fabric.holds(peer.address):
                self._lose(peer.name, f"{peer.name} has closed")
            elif peer.waiting and (reached := self._fabric.reach(peer.address, self._address)) is not None:
                while peer.waiting:
                    peer.waiting.popleft()(*reached)

    def _by_number(self, number: int) -> _Peer | None:
        return next((peer for peer in self._peers.values() if peer.number == number), None)

    def _deliver(self, number: int, frame: bytes) -> None:
        peer = self._by_number(number)
        if peer is None:
            return
        try:
            self._on_message(peer.name, frame)
        except Exception:
            log.exception("the message callback raised", peer=peer.name)

    def _offer(self, number: int, channel: int, send: _Send) -> None:
        peer = self._by_number(number)
        if peer is not None:
            peer.offers.setdefault(channel, deque()).append(send)

    def _copy_pieces(self) -> bool:
        """Copy one piece on every channel where both sides have posted; True if there's more to copy now."""
        copying = False
        for peer in list(self._peers.values()):
            for channel in [channel for channel in peer.receives if channel in peer.offers]:
                copying |= self._copy_piece(peer, channel)
        return copying

    def _copy_piece(self, peer: _Peer, channel: int) -> bool:
        send, receive = peer.offers[channel][0], peer.receives[channel][0]
        if receive.copied == 0 and not _same_lengths(send.pieces, receive.pieces):
            self._end_both(peer, channel, TransferError(f"the two sides of channel {channel} posted other pieces"))
            return True
        if not self._fabric.allow_piece():
            return False
        with send.lock:
            if send.ended:
                _pop(peer.offers, channel)
                receive.copied = 0
                return True
            source, target = send.pieces[receive.copied], receive.pieces[receive.copied]
            self._pool[target.offset : target.offset + target.length] = send.sender.read(source)
        receive.copied += 1
        if receive.copied == len(receive.pieces):
            self._end_both(peer, channel, None)
        return True

    def read(self, piece: Piece) -> Any:
        """For other transports: a view of a piece of this pool."""
        return self._pool[piece.offset : piece.offset + piece.length]

    def _end_both(self, peer: _Peer, channel: int, error: TransferError | None) -> None:
        send, receive = _pop(peer.offers, channel), _pop(peer.receives, channel)
        run_callback(receive.done, error)
        if send.end():
            send.sender.call_back(send.done, error)

    def call_back(self, done: Done, error: TransferError | None) -> None:
        """For other transports: run a callback on this transport's thread."""
        self._submit(lambda: run_callback(done, error), lambda _: done(error))


_Item = TypeVar("_Item")


def _pop(waiting: dict[int, deque[_Item]], channel: int) -> _Item:
    """Remove and return the first on a channel; a channel with none left is removed."""
    items = waiting[channel]
    item = items.popleft()
    if not items:
        del waiting[channel]
    return item


def _same_lengths(left: Sequence[Piece], right: Sequence[Piece]) -> bool:
    return [piece.length for piece in left] == [piece.length for piece in right]


def _refuse(done: Done | None) -> None:
    if done is not None:
        run_callback(done, PeerLost("the transport is closed"))
