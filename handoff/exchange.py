"""The transfer of one handoff's blocks between two nodes, over any transport.

    source        offer() --> OFFERED --Accept--> SENDING --all sent--> Sent
                                 `--Refuse, peer lost--> Broken  <--failed--'
    destination   expect() --> EXPECTED --Offer--> RECEIVING --all landed--> Landed
                                  |                    `--failed, or withdrawn meanwhile--> Broken
                                  `--withdraw()--> Broken

Each side reports exactly one end per transfer, and when it does, its memory is quiet: nothing of this transfer reads or
writes those blocks any more. An offer that was made is carried through even if the source no longer wants it: the
destination may have posted its receives, and only the bytes end them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import TypeAlias

import structlog

from handoff.compatibility import Compatibility
from handoff.pieces import coalesce
from handoff.pool_layout import PoolLayout
from handoff.transports.base import Link, Piece, TransferError, Transport
from handoff.wire import Accept, Message, Offer, Refuse, WireError, decode, encode
from scheduler.decode_scheduler import ReservedKv
from scheduler.ids import HandoffId, NodeId
from scheduler.prefill_scheduler import HeldKv

log = structlog.get_logger()

Key: TypeAlias = tuple[str, int]
"""(handoff_id, attempt)"""


@dataclass(frozen=True, slots=True)
class Landed:
    """Destination: every byte is in place. seconds: from posting the receives to the last byte."""

    handoff_id: HandoffId
    attempt: int
    first_token: int
    source: NodeId
    lane: str
    blocks: int
    bytes_moved: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Sent:
    """Source: every byte has left."""

    handoff_id: HandoffId
    attempt: int


@dataclass(frozen=True, slots=True)
class Broken:
    """Either side: the transfer ended without success."""

    handoff_id: HandoffId
    attempt: int
    reason: str


TransferEnd: TypeAlias = Landed | Sent | Broken


@dataclass(slots=True)
class _Outgoing:
    peer: str
    blocks: tuple[int, ...]
    slot: int
    sending: bool = False


@dataclass(slots=True)
class _Incoming:
    expected: ReservedKv
    offer: Offer | None = None
    peer: str = ""
    withdrawn: bool = False
    started: float = 0.0
    blocks: int = 0
    bytes_moved: int = 0


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """What a node must know of another to exchange KV with it."""

    node: NodeId
    incarnation: int
    address: bytes
    compatibility: Compatibility


@dataclass(slots=True)
class _State:
    """Guarded by the exchange's lock."""

    peers: dict[str, PeerInfo] = field(default_factory=dict)
    outgoing: dict[Key, _Outgoing] = field(default_factory=dict)
    incoming: dict[Key, _Incoming] = field(default_factory=dict)
    next_channel: int = 0


class Exchange:
    """One node's transfers. Calls come from the step loop, callbacks from the transport's thread."""

    def __init__(
        self,
        node: NodeId,
        incarnation: int,
        transport: Transport,
        compatibility: Compatibility,
        layout: PoolLayout,
        report: Callable[[TransferEnd], None],
        clock: Callable[[], float],
        adapter_digest: Callable[[str], str] = lambda name: name,
    ) -> None:
        """adapter_digest: of the adapter of that name here, empty if there is none. Called on any thread."""
        self._adapter_digest = adapter_digest
        self._node = node
        self._incarnation = incarnation
        self._transport = transport
        self._compatibility = compatibility
        self._layout = layout
        self._report = report
        self._clock = clock
        self._lock = Lock()
        self._state = _State()

    def start(self, pool: object) -> None:
        self._transport.start(self._node, pool, self._on_message)

    @property
    def info(self) -> PeerInfo:
        """What peers connect to; valid after `start`."""
        return PeerInfo(self._node, self._incarnation, self._transport.address, self._compatibility)

    def connect(self, peer: PeerInfo) -> None:
        """Raises IncompatiblePeer before any byte moves. A peer that came back takes the place of what it was."""
        self._compatibility.require_equal(peer.compatibility, peer.node)
        self._forget(peer.node, f"{peer.node} was connected anew")
        with self._lock:
            self._state.peers[peer.node] = peer
        self._transport.connect(peer.node, peer.address)

    def disconnect(self, peer: NodeId) -> None:
        """Give a peer up: its transfers end as broken, with quiet memory."""
        self._forget(peer, f"{peer} was given up")
        self._transport.disconnect(peer)

    def _forget(self, peer: NodeId, reason: str) -> None:
        """End the offers that this peer will never answer; the transport ends what it was told to move."""
        with self._lock:
            self._state.peers.pop(peer, None)
            unanswered = [key for key, out in self._state.outgoing.items() if out.peer == peer and not out.sending]
            for key in unanswered:
                del self._state.outgoing[key]
        for key in unanswered:
            self._end_broken(key, reason)

    def links(self) -> list[Link]:
        return self._transport.links()

    def close(self) -> None:
        self._transport.close()

    def offer(self, peer: NodeId, handoff_id: HandoffId, attempt: int, held: HeldKv) -> None:
        """Source: start a transfer of held blocks. Ends with Sent or Broken. An offer under way is not repeated."""
        key = (handoff_id, attempt)
        message = Offer(
            handoff_id=handoff_id,
            attempt=attempt,
            incarnation=self._incarnation,
            request_id=held.request_id,
            compatibility=self._compatibility.digest(),
            prompt_tokens=held.prompt_tokens,
            first_token=held.first_token,
            blocks=held.blocks,
            adapter=self._digest_of(held.adapter),
        )
        with self._lock:
            if key in self._state.outgoing:
                return
            known = peer in self._state.peers
            if known:
                self._state.outgoing[key] = _Outgoing(peer, held.blocks, held.slot)
        if not known:
            self._end_broken(key, f"{peer} is not connected")
            return
        try:
            self._send(peer, message)
        except WireError as error:
            self._on_sent(key, TransferError(str(error)))

    def expect(self, handoff_id: HandoffId, attempt: int, reserved: ReservedKv) -> None:
        """Destination: let a source fill the reserved blocks. Ends with Landed or Broken."""
        with self._lock:
            self._state.incoming[handoff_id, attempt] = _Incoming(reserved)

    def withdraw(self, handoff_id: HandoffId, attempt: int) -> None:
        """Destination: the reservation is no longer wanted. Broken follows, at once or when the bytes have come."""
        key = (handoff_id, attempt)
        with self._lock:
            incoming = self._state.incoming.get(key)
            if incoming is None:
                return
            incoming.withdrawn = True
            if incoming.offer is not None:
                return
            del self._state.incoming[key]
        self._end_broken(key, "withdrawn before any byte came")

    def _end_broken(self, key: Key, reason: str) -> None:
        self._report(Broken(HandoffId(key[0]), key[1], reason))

    def _send(self, peer: str, message: Message) -> None:
        self._transport.send_message(peer, encode(message))

    def _on_message(self, peer: str, frame: bytes) -> None:
        try:
            message = decode(frame)
        except WireError as error:
            log.warning("frame dropped", node=self._node, peer=peer, reason=str(error))
            return
        with self._lock:
            known = self._state.peers.get(peer)
        if known is None or known.incarnation != message.incarnation:
            log.warning(
                "message of a stale peer dropped",
                node=self._node,
                peer=peer,
                handoff_id=message.handoff_id,
                attempt=message.attempt,
            )
            return
        match message:
            case Offer():
                self._on_offer(peer, message)
            case Accept():
                self._on_accept(peer, message)
            case Refuse():
                self._on_refuse(message)

    def _on_offer(self, peer: str, offer: Offer) -> None:
        key = (offer.handoff_id, offer.attempt)
        with self._lock:
            incoming = self._state.incoming.get(key)
            refusal = self._refusal(incoming, offer)
            if refusal is None:
                assert incoming is not None
                incoming.offer, incoming.peer, incoming.started = offer, peer, self._clock()
                channel = self._state.next_channel
                self._state.next_channel = (channel + 1) % 2**32
        if refusal is not None:
            self._send(peer, Refuse(offer.handoff_id, offer.attempt, self._incarnation, refusal))
            return
        assert incoming is not None
        self._receive(key, incoming, offer, channel)

    def _refusal(self, incoming: _Incoming | None, offer: Offer) -> str | None:
        if incoming is None:
            return "nothing is reserved for this handoff and attempt"
        if incoming.offer is not None:
            return "this handoff and attempt is being received already"
        if offer.compatibility != self._compatibility.digest():
            return "the nodes are not compatible"
        expected = incoming.expected
        if (offer.request_id, offer.prompt_tokens) != (expected.request_id, expected.prompt_tokens):
            return f"reserved for {expected.request_id} with {expected.prompt_tokens} prompt tokens"
        if len(offer.blocks) != len(expected.blocks):
            return f"{len(expected.blocks)} blocks are reserved, not {len(offer.blocks)}"
        if offer.adapter != self._digest_of(expected.adapter):
            return f"adapter {expected.adapter} is not the same on both nodes: load it anew on all"
        return None

    def _digest_of(self, adapter: str | None) -> str:
        return "" if adapter is None else self._adapter_digest(adapter)

    def _slot_pieces(self, slot: int) -> list[Piece]:
        """The record behind the blocks: the state is final only when all KV is."""
        return [self._layout.slot_piece(slot)] if self._layout.slot_bytes else []

    def _receive(self, key: Key, incoming: _Incoming, offer: Offer, channel: int) -> None:
        first = incoming.expected.cached_blocks
        blocks = incoming.expected.blocks[first:]
        _, pieces = coalesce(offer.blocks[first:], blocks, self._layout.block_bytes)
        pieces += self._slot_pieces(incoming.expected.slot)
        incoming.blocks, incoming.bytes_moved = len(blocks), sum(piece.length for piece in pieces)
        if pieces:
            self._transport.post_receive(incoming.peer, channel, pieces, lambda error: self._on_received(key, error))
        self._send(
            incoming.peer,
            Accept(
                handoff_id=offer.handoff_id,
                attempt=offer.attempt,
                incarnation=self._incarnation,
                channel=channel,
                first_block=first,
                blocks=blocks,
            ),
        )
        if not pieces:
            self._on_received(key, None)

    def _on_received(self, key: Key, error: TransferError | None) -> None:
        with self._lock:
            incoming = self._state.incoming.pop(key)
        offer = incoming.offer
        assert offer is not None
        if error is not None:
            self._end_broken(key, str(error))
        elif incoming.withdrawn:
            self._end_broken(key, "withdrawn while the bytes came")
        else:
            self._report(
                Landed(
                    handoff_id=HandoffId(key[0]),
                    attempt=key[1],
                    first_token=offer.first_token,
                    source=NodeId(incoming.peer),
                    lane=self._lane(incoming.peer),
                    blocks=incoming.blocks,
                    bytes_moved=incoming.bytes_moved,
                    seconds=self._clock() - incoming.started,
                )
            )

    def _lane(self, peer: str) -> str:
        return next((link.lane for link in self._transport.links() if link.peer == peer), "unknown")

    def _on_accept(self, peer: str, accept: Accept) -> None:
        key = (accept.handoff_id, accept.attempt)
        with self._lock:
            outgoing = self._state.outgoing.get(key)
            if outgoing is None or outgoing.sending or outgoing.peer != peer:
                log.warning("unexpected accept dropped", node=self._node, peer=peer, handoff_id=key[0])
                return
            outgoing.sending = True
        blocks = outgoing.blocks[accept.first_block :]
        if len(blocks) != len(accept.blocks):
            self._on_sent(key, TransferError("the destination accepted another number of blocks"))
            return
        pieces, _ = coalesce(blocks, accept.blocks, self._layout.block_bytes)
        pieces += self._slot_pieces(outgoing.slot)
        if pieces:
            self._transport.post_send(peer, accept.channel, pieces, lambda error: self._on_sent(key, error))
        else:
            self._on_sent(key, None)

    def _on_sent(self, key: Key, error: TransferError | None) -> None:
        with self._lock:
            del self._state.outgoing[key]
        if error is None:
            self._report(Sent(HandoffId(key[0]), key[1]))
        else:
            self._end_broken(key, str(error))

    def _on_refuse(self, refuse: Refuse) -> None:
        key = (refuse.handoff_id, refuse.attempt)
        with self._lock:
            outgoing = self._state.outgoing.get(key)
            if outgoing is None or outgoing.sending:
                return
            del self._state.outgoing[key]
        self._end_broken(key, f"refused: {refuse.reason}")
