"""The transfers of one node's handoffs, over any transport.

    source        offer() advance() ... complete() ---> Sent | Broken | Ceased
    destination   expect() ---------------------------> Landed | Broken | Ceased

Each side reports exactly one end per transfer, and when it does, its memory is quiet: nothing of this transfer reads or
writes those blocks any more. The one exception is a prefill that lost its blocks while they were sent; see
`transfer_out` why that does no harm.

`sender` and `receiver` are the two halves; here is what both need of peers.
"""

from collections.abc import Callable
from threading import RLock

import structlog

from handoff.checksum import Checksums
from handoff.compatibility import Compatibility
from handoff.pool_layout import PoolLayout
from handoff.receiver import Receiver
from handoff.relayout.check import check_either_way
from handoff.relayout.path import require_equal_ranks
from handoff.sender import Sender
from handoff.transfer_ends import TransferEnd
from handoff.transfer_in import BadSegment
from handoff.transfer_out import Progress
from handoff.transports.base import Link, Transport
from handoff.wire import Accept, Cease, Message, Offer, Refuse, Segment, WireError, decode
from handoff.wiring import PeerInfo, Wiring
from scheduler.decode_scheduler import ReservedKv
from scheduler.ids import HandoffId, NodeId, RequestId
from scheduler.prefill_scheduler import HeldKv

log = structlog.get_logger()


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
        checksums: Checksums = "sampled",
    ) -> None:
        """adapter_digest: of the adapter of that name here, empty if there is none. Called on any thread."""
        self._node = node
        self._incarnation = incarnation
        self._transport = transport
        self._compatibility = compatibility
        self._wiring = Wiring(incarnation, transport, compatibility, layout, report, clock, adapter_digest, checksums)
        # Held while messages are sent: they must leave in the order in which the transfers went on.
        self._lock = RLock()
        self._sender = Sender(self._wiring, self._lock)
        self._receiver = Receiver(self._wiring, self._lock)

    def start(self, pool: object) -> None:
        self._wiring.start(pool)
        self._transport.start(self._node, pool, self._on_message)

    @property
    def info(self) -> PeerInfo:
        """What peers connect to; valid after `start`."""
        return PeerInfo(self._node, self._incarnation, self._transport.address, self._compatibility)

    def connect(self, peer: PeerInfo) -> None:
        """Raises IncompatiblePeer before any byte moves. A peer that came back takes the place of what it was."""
        check_either_way(self._compatibility, peer.compatibility, peer.node)
        require_equal_ranks(self._compatibility, peer.compatibility, peer.node)
        self._forget(peer.node, f"{peer.node} was connected anew")
        with self._lock:
            self._wiring.peers[peer.node] = peer
        self._transport.connect(peer.node, peer.address)

    def disconnect(self, peer: NodeId) -> None:
        """Give a peer up: its transfers end as broken, with quiet memory."""
        self._forget(peer, f"{peer} was given up")
        self._transport.disconnect(peer)

    def _forget(self, peer: NodeId, reason: str) -> None:
        with self._lock:
            self._wiring.peers.pop(peer, None)
            self._sender.forget(peer, reason)
            self._receiver.forget(peer, reason)

    def links(self) -> list[Link]:
        return self._transport.links()

    def close(self) -> None:
        self._transport.close()
        self._receiver.close()

    def offer(
        self,
        peer: NodeId,
        handoff_id: HandoffId,
        attempt: int,
        request_id: RequestId,
        prompt_tokens: int,
        adapter: str | None = None,
    ) -> None:
        """Source: start a transfer, before or after the KV is there. An offer under way is not repeated."""
        with self._lock:
            self._sender.offer(peer, handoff_id, attempt, request_id, prompt_tokens, adapter)

    def sending_to(self, handoff_id: HandoffId, attempt: int) -> str | None:
        """Source: the peer of a transfer that has not ended."""
        with self._lock:
            return self._sender.peer_of(handoff_id, attempt)

    def advance(self, handoff_id: HandoffId, attempt: int, progress: Progress) -> None:
        """Source: more blocks are final, or the sequence lost its blocks."""
        with self._lock:
            self._sender.advance(handoff_id, attempt, progress)

    def layers_final(self, handoff_id: HandoffId, attempt: int, layers: int, generation: int) -> None:
        """Source: of the chunk that ends the prompt, being computed, so many first layers are final. Any thread."""
        with self._lock:
            self._sender.layers_final(handoff_id, attempt, layers, generation)

    def complete(self, handoff_id: HandoffId, attempt: int, held: HeldKv) -> bool:
        """Source: all is final; what is left goes out with the record. False if the transfer has ended before."""
        with self._lock:
            return self._sender.complete(handoff_id, attempt, held)

    def cease(self, handoff_id: HandoffId, attempt: int, reason: str) -> None:
        """Source: the KV is not there any more, or not wanted. What was announced is carried through."""
        with self._lock:
            self._sender.cease(handoff_id, attempt, reason)

    def expect(self, handoff_id: HandoffId, attempt: int, reserved: ReservedKv) -> None:
        """Destination: let a source fill the reserved blocks."""
        with self._lock:
            self._receiver.expect(handoff_id, attempt, reserved)

    def withdraw(self, handoff_id: HandoffId, attempt: int) -> None:
        """Destination: the reservation is no longer wanted. Ceased follows, at once or when the source has answered."""
        with self._lock:
            self._receiver.withdraw(handoff_id, attempt)

    def _on_message(self, peer: str, frame: bytes) -> None:
        try:
            message = decode(frame)
        except WireError as error:
            log.warning("frame dropped", node=self._node, peer=peer, reason=str(error))
            return
        with self._lock:
            known = self._wiring.peers.get(peer)
            if known is None or known.incarnation != message.incarnation or not self._take(peer, message):
                log.warning(
                    "message of a stale peer or transfer dropped",
                    node=self._node,
                    peer=peer,
                    type=type(message).__name__,
                    handoff_id=message.handoff_id,
                    attempt=message.attempt,
                )

    def _take(self, peer: str, message: Message) -> bool:
        """False if nothing here waits for it."""
        match message:
            case Offer():
                self._receiver.on_offer(peer, message)
            case Segment():
                return self._take_segment(peer, message)
            case Accept():
                return self._sender.on_accept(peer, message)
            case Refuse():
                self._sender.on_refuse(peer, message)
            case Cease():
                self._sender.on_cease(peer, message)
                self._receiver.on_cease(peer, message)
        return True

    def _take_segment(self, peer: str, segment: Segment) -> bool:
        try:
            return self._receiver.on_segment(peer, segment)
        except BadSegment as error:
            # Its bytes will never be received, and only giving the peer up ends them.
            log.error("peer breaks the protocol", node=self._node, peer=peer, reason=str(error))
            self.disconnect(NodeId(peer))
            return True
