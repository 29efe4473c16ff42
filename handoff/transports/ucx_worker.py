"""UCX context, worker and endpoints: peers, messages, pieces. Made, used and closed on one thread.

`ucx_wire` says how peers are told apart. `UcxTransport` owns the thread and calls, in a loop: the callers'
commands, `progress`, again the commands, `serve`.
"""

import os
import secrets
import time
from collections import deque
from collections.abc import Sequence
from logging import INFO, WARNING
from typing import Any

import numpy as np
import structlog
from ucxx._lib.arr import Array
from ucxx._lib.libucxx import UCXAddress, UCXContext, UCXEndpoint, UCXError, UCXWorker, UCXXTag, UCXXTagMask

from handoff.transports.base import Done, Link, OnMessage, PeerLost, Piece
from handoff.transports.liveness import PEER_SILENCE_S
from handoff.transports.pieces import run_callback
from handoff.transports.shared_pools import SharedPools
from handoff.transports.ucx_door import Door, Stranger
from handoff.transports.ucx_links import (
    endpoint_transports,
    host_identity,
    joint_lane,
    lane_name,
    lane_warning,
    pool_lane,
)
from handoff.transports.ucx_lost import LostTransfers
from handoff.transports.ucx_peer import UcxPeer
from handoff.transports.ucx_pool import span_maker
from handoff.transports.ucx_seal import NONCE_BYTES, ClusterKey, FramesMissing
from handoff.transports.ucx_shared import SharedLane
from handoff.transports.ucx_transfer import Receive, Send
from handoff.transports.ucx_wire import (
    FRAME_BIT,
    HELLO_BYTES,
    HELLO_TAG,
    IDENTITY_BYTES,
    NO_NONCE,
    NUMBER_BITS,
    NUMBER_MASK,
    Address,
    Heed,
    Hello,
    next_number,
    number_of,
    piece_tag,
)

log = structlog.get_logger()

CLOSE_PERIOD_NS = 1_000_000_000
CLOSE_ATTEMPTS = 2
"""How long closing an endpoint may take: period times attempts. It takes milliseconds, also with a dead peer."""
CLOSE_QUIET_S = 0.5
"""How long closing the transport waits for UCX to let go of memory before it takes UCX down."""
RETIRED_NUMBERS = 256
"""Numbers of given-up connections whose late pieces are still looked for."""
EAGER_BYTES = 8192
"""Late pieces up to this size lie in UCX's memory; longer ones are only announced, and stay with the sender."""

_FRAMES = (UCXXTag(FRAME_BIT), UCXXTagMask(FRAME_BIT))
_EXACTLY = UCXXTagMask((1 << 64) - 1)
_PIECES_OF_NUMBER = UCXXTagMask(FRAME_BIT | NUMBER_MASK)


class UcxWorker:
    """See the module's docstring. Raises UCXError when UCX can't start."""

    def __init__(
        self, pool: Any, on_message: OnMessage, peer_silence_s: float = PEER_SILENCE_S, secret: bytes = b""
    ) -> None:
        self._worker = UCXWorker(UCXContext())
        self._worker.init_blocking_progress_mode()
        self._span = span_maker(pool)
        self._on_message = on_message
        self._peer_silence_s = peer_silence_s
        identity = secrets.token_bytes(IDENTITY_BYTES)
        self._pool = pool
        self._shared = SharedPools(pool, identity, os.environ)
        self._own = Address(identity, host_identity(), self._worker.address.tobytes(), self._shared.place)
        self._number = secrets.randbits(NUMBER_BITS - 1)
        self._peers: dict[str, UcxPeer] = {}
        self._by_number: dict[int, UcxPeer] = {}
        self._by_identity: dict[bytes, UcxPeer] = {}
        self._key = ClusterKey(secret)
        self._door = Door(self._key, identity)
        self._retired: deque[int] = deque(maxlen=RETIRED_NUMBERS)
        self._hellos: deque[tuple[Any, Any]] = deque()
        self._unsettled: list[tuple[Any, Any]] = []
        self._lost = LostTransfers()
        self.links: dict[str, Link] = {}
        """Replaced, never changed in place: other threads read it."""

    @property
    def address(self) -> bytes:
        return self._own.pack()

    @property
    def event_fd(self) -> int:
        """Readable when there's something to progress, once `arm` has returned True."""
        return int(self._worker.epoll_file_descriptor)

    @property
    def busy(self) -> bool:
        """Something waits for a peer or for UCX."""
        return bool(self._lost or self._hellos) or any(peer.busy for peer in self._peers.values())

    def arm(self) -> bool:
        return bool(self._worker.arm())

    def progress(self) -> bool:
        """Let UCX work; True if it did."""
        if not self._worker.progress_once():
            return False
        self._worker.progress()
        return True

    def connect(self, name: str, address: Address) -> None:
        self.disconnect(name)
        renamed = self._by_identity.get(address.identity)
        if renamed is not None:
            self.disconnect(renamed.name)
        self._sweep()
        try:
            remote = UCXAddress.create_from_buffer(address.worker)
            endpoint = UCXEndpoint.create_from_worker_address(self._worker, remote, True)
        except (UCXError, ValueError) as error:
            log.warning("ucx can't reach the peer", peer=name, error=str(error))
            return
        self._number = next_number(self._number)
        same_host = address.host == self._own.host
        source = self._shared.reach(name, address) if same_host else None
        self._shared.set(self._number)
        lane = SharedLane(self._number, source, self._pool)
        nonce = secrets.token_bytes(NONCE_BYTES)
        peer = UcxPeer(name, address, endpoint, lane, same_host, self._peer_silence_s, nonce)
        self._peers[name] = self._by_number[self._number] = self._by_identity[peer.identity] = peer
        early = self._door.early.take(peer.identity)
        if early is None:
            self._say_hello(peer, None)
        else:
            self._heed(peer, early)

    def disconnect(self, name: str) -> None:
        peer = self._peers.get(name)
        if peer is not None:
            self._lose(peer, f"{name} was disconnected")

    def send_message(self, name: str, frame: bytes) -> None:
        peer = self._peers.get(name)
        if peer is None:
            log.warning("message dropped: its peer is not connected", peer=name, length=len(frame))
            return
        peer.send_message(frame)
        if peer.overrun:
            self._lose(peer, f"{name} takes no messages")

    def post_send(self, name: str, channel: int, pieces: Sequence[Piece], done: Done) -> None:
        peer = self._peers.get(name)
        if peer is None:
            run_callback(done, _not_connected(name))
            return

        def post(piece: Piece) -> Any:
            # The peer's number is known: transfers advance only after its hello.
            tag = piece_tag(peer.pairing.peer_number or 0, channel)
            return peer.endpoint.tag_send(self._span(piece), UCXXTag(tag))

        def begin() -> None:
            if peer.pairing.peer_reads:
                peer.shared.post_send(channel, pieces, done)
            else:
                peer.sends.append(Send(channel, pieces, post, done))

        peer.add_send(begin)

    def post_receive(self, name: str, channel: int, pieces: Sequence[Piece], done: Done) -> None:
        peer = self._peers.get(name)
        if peer is None:
            run_callback(done, _not_connected(name))
            return
        if peer.shared.source is not None:
            peer.shared.post_receive(channel, pieces, done)
            return
        endpoint, tag = peer.endpoint, UCXXTag(piece_tag(peer.pairing.number, channel))
        peer.add_receive(Receive(channel, pieces, lambda piece: endpoint.tag_recv(self._span(piece), tag), done))

    def serve(self) -> bool:
        """Take what has arrived, move every operation on, run callbacks. True if anything changed."""
        changed = self._take_frames()
        while self._hellos and self._hellos[0][0].completed:
            self._take_hello(self._hellos.popleft()[1].tobytes())
        for peer in list(self._peers.values()):
            if self._peers.get(peer.name) is peer:
                changed |= self._serve_peer(peer)
        if self._lost:
            self._lost.settle(time.monotonic())
        return changed

    def tick(self) -> None:
        """Housekeeping, at least once a second or so: dead endpoints, late pieces, buffers of old messages."""
        for peer in list(self._peers.values()):
            if not peer.endpoint.alive:
                self._lose(peer, f"the connection to {peer.name} has ended")
        self._unsettled = [(request, buffer) for request, buffer in self._unsettled if not request.completed]
        self._sweep()

    def watch(self) -> None:
        """Ask peers that are silent, and give up those that have been for too long; several times in that time."""
        now = time.monotonic()
        for peer in list(self._peers.values()):
            if not peer.watch(now):
                self._lose(peer, f"{peer.name} has been silent for {self._peer_silence_s:.1f} s")

    def close(self) -> None:
        """Give up all peers, then UCX itself: after that nothing can touch the pool, so all callbacks run."""
        for peer in list(self._peers.values()):
            self._lose(peer, "the transport was closed")
        deadline = time.monotonic() + CLOSE_QUIET_S
        while self._lost and (now := time.monotonic()) < deadline:
            self._worker.progress()
            self._lost.settle(now)
        remaining = self._lost.release()
        del self._worker
        # Only now: UCX may have used these buffers until its worker was gone.
        self._unsettled.clear()
        self._hellos.clear()
        for transfer in remaining:
            transfer.finish()
        self._shared.close()

    def _serve_peer(self, peer: UcxPeer) -> bool:
        try:
            for frame in peer.arrived():
                self._deliver(peer.name, frame)
            changed = peer.advance()
        except (UCXError, FramesMissing) as error:
            self._lose(peer, f"the connection to {peer.name} failed: {error}")
            return True
        if peer.failed and not peer.endpoint.alive:
            self._lose(peer, f"the connection to {peer.name} has ended")
            return True
        if peer.shared.given_up:
            self._lose(peer, f"{peer.name} has given up this connection")
            return True
        for transfer in peer.take_ended():
            transfer.finish()
        for operation in peer.shared.take_ended():
            operation.finish()
        return changed

    def _deliver(self, name: str, frame: bytes) -> None:
        try:
            self._on_message(name, frame)
        except Exception:
            log.exception("the message callback raised", peer=name)

    def _take_frames(self) -> bool:
        taken = False
        # A probe leaves what it has found in its place, until its length has been looked at.
        while (probe := self._worker.tag_probe(*_FRAMES)).matched:
            taken = True
            tag = probe.sender_tag.value
            peer = self._by_number.get(number_of(tag))
            if tag == HELLO_TAG and probe.length == HELLO_BYTES:
                self._take_apart(probe)
            elif peer is not None and peer.takes(tag, probe.length):
                peer.expect(probe)
            else:
                self._discard(probe)
        return taken

    def _take_apart(self, probe: Any) -> None:
        """Receive a hello, which belongs to no connection."""
        buffer = np.empty(probe.length, np.uint8)
        self._hellos.append((self._worker.tag_recv(Array(buffer), probe.sender_tag, _EXACTLY), buffer))

    def _discard(self, probe: Any) -> None:
        """Of no connection, or too long for what it claims to be: one byte of it is received, UCX drops the rest."""
        buffer = np.empty(1, np.uint8)
        request = self._worker.tag_recv(Array(buffer), probe.sender_tag, _EXACTLY)
        if not request.completed:
            self._unsettled.append((request, buffer))

    def _take_hello(self, data: bytes) -> None:
        try:
            hello = self._door.admit(data, time.monotonic())
        except Stranger as stranger:
            self._refuse(stranger)
            return
        if hello is None:
            return
        peer = self._by_identity.get(hello.identity)
        if peer is None:
            self._door.early.keep(hello)
        else:
            self._heed(peer, hello)

    def _refuse(self, stranger: Stranger) -> None:
        """An open connection is left alone: somebody else may have sent this in the peer's name."""
        peer = self._by_identity.get(stranger.hello.identity)
        if stranger.is_news:
            log.warning("peer refused", peer=peer.name if peer else None, reason=str(stranger))
        if peer is not None and not peer.pairing.is_open:
            # It may have dropped our first hello, before its own `connect`, and is to learn that nothing will follow.
            self._say_hello(peer, None)
            self._lose(peer, _not_authenticated(peer.name))

    def _heed(self, peer: UcxPeer, hello: Hello) -> None:
        heed = peer.pairing.heed(hello)
        if heed is Heed.SUPERSEDED:
            self._lose(peer, f"{peer.name} has given up this connection and connected anew")
            self._door.early.keep(hello)
        if heed in (Heed.OPEN, Heed.OPEN_AND_ANSWER):
            peer.open(peer.pairing.seals(self._key, self._own.identity, peer.identity))
            self._note_link(peer)
        if heed in (Heed.ANSWER, Heed.OPEN_AND_ANSWER):
            self._say_hello(peer, hello)

    def _say_hello(self, peer: UcxPeer, answered: Hello | None) -> None:
        """answered: None for the first one."""
        pairing, reads = peer.pairing, peer.shared.source is not None
        seen, echo = (answered.number, answered.nonce) if answered else (0, NO_NONCE)
        hello = Hello(self._own.identity, peer.identity, pairing.number, seen, pairing.nonce, echo, reads)
        try:
            peer.send_hello(hello.pack(self._key))
        except UCXError as error:
            self._lose(peer, f"the connection to {peer.name} failed: {error}")

    def _note_link(self, peer: UcxPeer) -> None:
        lane = self._lane(peer)
        link = Link(peer.name, lane, lane_warning(lane, peer.same_host, os.environ))
        if self.links.get(peer.name) != link:
            log.log(WARNING if link.warning else INFO, "link", peer=peer.name, lane=lane, warning=link.warning)
        self.links = {**self.links, peer.name: link}

    def _lane(self, peer: UcxPeer) -> str:
        by_ucx = lane_name(endpoint_transports(peer.endpoint.handle))
        theirs = peer.place if peer.shared.source else None
        ours = self._own.place if peer.pairing.peer_reads else None
        return joint_lane(*(pool_lane(place) if place else by_ucx for place in (theirs, ours)))

    def _lose(self, peer: UcxPeer, reason: str) -> None:
        """Give the peer up. Its transfers end when UCX has let go of their memory, which closing brings about."""
        number = peer.pairing.number
        # Before anything ends: from then on our memory is used for something else.
        self._shared.clear(number)
        del self._peers[peer.name], self._by_number[number], self._by_identity[peer.identity]
        self.links = {name: link for name, link in self.links.items() if name != peer.name}
        self._retired.append(number)
        pending = peer.abandon(PeerLost(reason))
        try:
            peer.endpoint.close_blocking(CLOSE_PERIOD_NS, CLOSE_ATTEMPTS)
        except UCXError as error:
            log.warning("closing an endpoint failed", peer=peer.name, error=str(error))
        self._lost.add(peer.name, pending, time.monotonic())
        self._unsettled += peer.unsettled()
        for operation in peer.shared.abandon(PeerLost(reason)):
            operation.finish()

    def _sweep(self) -> None:
        """Drop late pieces of given-up connections, which would stay in UCX's memory for ever."""
        for number in self._retired:
            tag = UCXXTag(piece_tag(number, 0))
            while (late := self._worker.tag_probe(tag, _PIECES_OF_NUMBER)).matched and late.length <= EAGER_BYTES:
                self._discard(late)


def _not_authenticated(name: str) -> str:
    return (
        f"{name} is not authenticated: it has another cluster secret or none."
        " All machines of a cluster need the same cluster_secret_file"
    )


def _not_connected(name: str) -> PeerLost:
    return PeerLost(f"{name} is not connected")
