"""The destination half of an exchange: what `transfer_in` says, with real messages and pieces."""

from threading import RLock

from handoff.arrival import Arrival, WrongBytes
from handoff.compatibility import IncompatiblePeer
from handoff.pieces import coalesce
from handoff.staged_receiver import StagedReceiver
from handoff.transfer_ends import Broken, Ceased, Key, Landed
from handoff.transfer_in import Incoming
from handoff.transports.base import TransferError
from handoff.wire import MAX_SEGMENTS, Accept, Cease, Offer, Refuse, Segment, WireError
from handoff.wiring import Wiring
from scheduler.decode_scheduler import ReservedKv
from scheduler.ids import HandoffId, NodeId


class Receiver:
    """Called with `lock` held; what the transport calls takes it."""

    def __init__(self, wiring: Wiring, lock: RLock) -> None:
        self._wiring = wiring
        self._lock = lock
        self._transfers: dict[Key, Incoming] = {}
        self._next_channel = 0
        self._staged = StagedReceiver(wiring, lock)

    def close(self) -> None:
        """After the transport is closed."""
        self._staged.close()

    def expect(self, handoff_id: HandoffId, attempt: int, reserved: ReservedKv) -> None:
        """Let a source fill the reserved blocks."""
        self._transfers[handoff_id, attempt] = Incoming(reserved, self._wiring.layout.layers)

    def withdraw(self, handoff_id: HandoffId, attempt: int) -> None:
        """The reservation is no longer wanted: Ceased follows, at once or when the source has answered."""
        key = (handoff_id, attempt)
        incoming = self._transfers.get(key)
        if incoming is None or incoming.is_withdrawn:
            return
        incoming.is_withdrawn = True
        if incoming.offer is None:
            incoming.close()
            self._end(key, incoming)
        elif incoming.record is None:
            self._wiring.send(incoming.peer, Cease(key[0], key[1], self._wiring.incarnation, "withdrawn"))

    def on_offer(self, peer: str, offer: Offer) -> None:
        key = (offer.handoff_id, offer.attempt)
        incoming = self._transfers.get(key)
        refusal = self._refusal(peer, incoming, offer)
        if refusal is None:
            assert incoming is not None
            refusal = self._accept(peer, incoming, offer)
            if refusal is None:
                return
            incoming.close(refusal)
            self._end(key, incoming)
        self._wiring.send(peer, Refuse(offer.handoff_id, offer.attempt, self._wiring.incarnation, refusal[:500]))

    def _accept(self, peer: str, incoming: Incoming, offer: Offer) -> str | None:
        """Why it can't be, if it can't."""
        channel = self._next_channel
        self._next_channel = (channel + MAX_SEGMENTS) % 2**32
        limit = 0
        try:
            route = self._wiring.route_from(peer)
            if route is None:
                incoming.open(peer, offer, channel)
            else:
                limit = self._staged.limit(route)
                incoming.open_staged(peer, offer, channel, route, limit)
            expected = incoming.expected
            self._wiring.send(
                peer,
                Accept(
                    handoff_id=offer.handoff_id,
                    attempt=offer.attempt,
                    incarnation=self._wiring.incarnation,
                    channel=channel,
                    cached_tokens=expected.cached_blocks * self._wiring.compatibility.block_size,
                    blocks=expected.blocks[expected.cached_blocks :],
                    segment_blocks=limit,
                ),
            )
        except (IncompatiblePeer, WireError) as error:
            return str(error)
        return None

    def _refusal(self, peer: str, incoming: Incoming | None, offer: Offer) -> str | None:
        if incoming is None:
            return "nothing is reserved for this handoff and attempt"
        if incoming.offer is not None:
            return "this handoff and attempt is being received already"
        if offer.compatibility != self._wiring.peers[peer].compatibility.digest():
            return f"{peer} is not what it was when it was connected"
        expected = incoming.expected
        if expected.source not in (None, peer):
            return f"reserved for {expected.source}"
        if (offer.request_id, offer.prompt_tokens) != (expected.request_id, expected.prompt_tokens):
            return f"reserved for {expected.request_id} with {expected.prompt_tokens} prompt tokens"
        if offer.adapter != self._wiring.digest_of(expected.adapter):
            return _other_adapter(expected.adapter)
        return None

    def on_segment(self, peer: str, segment: Segment) -> bool:
        """False if nobody waits for it. Raises BadSegment: its bytes will not be received."""
        key = (segment.handoff_id, segment.attempt)
        incoming = self._transfers.get(key)
        if incoming is None or incoming.peer != peer:
            return False
        incoming.take(segment, self._wiring.clock())
        expected, record = incoming.expected, segment.record
        if record is not None and record.adapter != self._wiring.digest_of(expected.adapter):
            incoming.error = _other_adapter(expected.adapter)
        slot_pieces = [] if record is None else self._wiring.slot_pieces(expected.slot)
        arrival = Arrival(peer, segment, incoming, slot_pieces, lambda error: self._on_received(key, segment, error))
        if incoming.route is None:
            self._receive(arrival)
        else:
            self._staged.receive(arrival, incoming.route)
        return True

    def _receive(self, arrival: Arrival) -> None:
        """Straight into the reserved blocks."""
        segment = arrival.segment
        first = segment.first_block
        into = arrival.incoming.expected.blocks[first : first + len(segment.blocks)]
        layout = self._wiring.layout
        pieces = coalesce(segment.blocks, into, layout.block_bytes, layout.part(segment.layers)).receives

        def landed(error: TransferError | None) -> None:
            arrival.done(error or arrival.verify(self._wiring, layout.block_bytes, into))

        arrival.post(self._wiring, pieces, landed)

    def _on_received(self, key: Key, segment: Segment, error: TransferError | None) -> None:
        with self._lock:
            incoming = self._transfers[key]
            incoming.landed(segment.number, None if error is None else str(error), self._wiring.clock())
            if error is not None and not isinstance(error, WrongBytes):
                incoming.close()  # the lane is gone, and no segment can follow
            elif error is not None and not incoming.is_over:
                self._wiring.send(incoming.peer, Cease(key[0], key[1], self._wiring.incarnation, str(error)))
            self._end(key, incoming)

    def _end(self, key: Key, incoming: Incoming) -> None:
        if not incoming.is_over or self._transfers.pop(key, None) is None:
            return
        handoff_id, attempt = HandoffId(key[0]), key[1]
        if incoming.error is not None:
            self._wiring.report(Broken(handoff_id, attempt, incoming.error))
        elif incoming.is_withdrawn or incoming.record is None:
            self._wiring.report(Ceased(handoff_id, attempt))
        else:
            self._wiring.report(
                Landed(
                    handoff_id=handoff_id,
                    attempt=attempt,
                    first_token=incoming.record.first_token,
                    source=NodeId(incoming.peer),
                    lane=self._wiring.lane(incoming.peer),
                    blocks=incoming.blocks_moved,
                    bytes_moved=incoming.bytes_moved,
                    seconds=incoming.receiving_s,
                    exposed_s=incoming.exposed_s,
                    exposed_bytes=incoming.exposed_bytes,
                )
            )

    def on_cease(self, peer: str, cease: Cease) -> None:
        """The source sends no more."""
        key = (cease.handoff_id, cease.attempt)
        incoming = self._transfers.get(key)
        if incoming is not None and incoming.peer == peer:
            incoming.close()
            self._end(key, incoming)

    def forget(self, peer: str, reason: str) -> None:
        """Nothing comes from this peer any more; the transport ends what is under way."""
        for key, incoming in list(self._transfers.items()):
            if incoming.peer == peer:
                incoming.close(reason if incoming.record is None else None)
                self._end(key, incoming)


def _other_adapter(name: str | None) -> str:
    return f"adapter {name} is not the same on both nodes: load it anew on all"
