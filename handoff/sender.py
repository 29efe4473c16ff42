"""The source half of an exchange: what `transfer_out` says, with real messages and pieces."""

from threading import RLock

from handoff.pieces import coalesce
from handoff.transfer_ends import Broken, Ceased, Key, Sent
from handoff.transfer_out import Cut, Outgoing, Progress
from handoff.transports.base import Piece, TransferError
from handoff.wire import Accept, Cease, Offer, Record, Refuse, Segment, WireError
from handoff.wiring import Wiring
from scheduler.ids import HandoffId, NodeId, RequestId
from scheduler.prefill_scheduler import HeldKv


class Sender:
    """Called with `lock` held; what the transport calls takes it."""

    def __init__(self, wiring: Wiring, lock: RLock) -> None:
        self._wiring = wiring
        self._lock = lock
        self._transfers: dict[Key, Outgoing] = {}

    def offer(
        self,
        peer: NodeId,
        handoff_id: HandoffId,
        attempt: int,
        request_id: RequestId,
        prompt_tokens: int,
        adapter: str | None = None,
    ) -> None:
        """Start a transfer, before or after the KV is there. An offer under way is not repeated."""
        key = (handoff_id, attempt)
        message = Offer(
            handoff_id=handoff_id,
            attempt=attempt,
            incarnation=self._wiring.incarnation,
            request_id=request_id,
            compatibility=self._wiring.compatibility.digest(),
            prompt_tokens=prompt_tokens,
            adapter=self._wiring.digest_of(adapter),
            checksums=self._wiring.checksums,
        )
        if key in self._transfers:
            return
        if peer not in self._wiring.peers:
            self._wiring.report(Broken(handoff_id, attempt, f"{peer} is not connected"))
            return
        sizes = self._wiring.compatibility.block_size, self._wiring.peers[peer].compatibility.block_size
        self._transfers[key] = Outgoing(peer, prompt_tokens, *sizes, layers=self._wiring.layout.layers)
        self._wiring.send(peer, message)

    def peer_of(self, handoff_id: HandoffId, attempt: int) -> str | None:
        """Where a transfer that has not ended goes."""
        out = self._transfers.get((handoff_id, attempt))
        return None if out is None else out.peer

    def advance(self, handoff_id: HandoffId, attempt: int, progress: Progress) -> None:
        """More blocks are final, or the sequence lost its blocks."""
        key = (handoff_id, attempt)
        out = self._transfers.get(key)
        if out is not None and not out.is_closed:
            out.advance(progress)
            self._pump(key, out)

    def layers_final(self, handoff_id: HandoffId, attempt: int, layers: int, generation: int) -> None:
        """See Outgoing."""
        key = (handoff_id, attempt)
        out = self._transfers.get(key)
        if out is not None and not out.is_closed:
            out.layers_final(layers, generation)
            self._pump(key, out)

    def complete(self, handoff_id: HandoffId, attempt: int, held: HeldKv) -> bool:
        """All is final: what is left goes out with the record. False if the transfer has ended before."""
        if (handoff_id, attempt) not in self._transfers:
            return False
        record = Record(held.first_token, self._wiring.digest_of(held.adapter))
        progress = Progress(held.blocks, len(held.blocks), held.generation, record, held.slot)
        self.advance(handoff_id, attempt, progress)
        return True

    def cease(self, handoff_id: HandoffId, attempt: int, reason: str) -> None:
        """The KV is not there any more, or not wanted. What was announced is carried through."""
        key = (handoff_id, attempt)
        out = self._transfers.get(key)
        if out is not None and not out.is_closed:
            out.ceased = True
            self._close(key, out, reason)

    def _pump(self, key: Key, out: Outgoing) -> None:
        """Send what may be sent."""
        while (cut := out.next()) is not None:
            self._send_segment(key, out, cut)
        self._end(key, out)

    def _send_segment(self, key: Key, out: Outgoing, cut: Cut) -> None:
        into = range(len(cut.blocks)) if cut.into is None else cut.into
        layout = self._wiring.layout
        pieces = coalesce(cut.blocks, into, layout.block_bytes, layout.part(cut.layers)).sends
        slot_pieces = self._wiring.slot_pieces(cut.slot) if cut.record is not None else []
        segment = Segment(
            handoff_id=key[0],
            attempt=key[1],
            incarnation=self._wiring.incarnation,
            number=cut.number,
            first_block=cut.first,
            blocks=cut.blocks,
            checksum=self._wiring.checksum(self._wiring.checksums, cut.blocks, slot_pieces, cut.layers),
            layers=cut.layers,
            record=cut.record,
        )
        try:
            self._wiring.send(out.peer, segment)
        except WireError as error:
            out.sent(cut.number, str(error))
            self._close(key, out, str(error))
            return
        self._post_send(key, out.peer, cut, pieces + slot_pieces)

    def _post_send(self, key: Key, peer: str, cut: Cut, pieces: list[Piece]) -> None:
        def done(error: TransferError | None) -> None:
            self._on_sent(key, cut.number, error)

        if pieces:
            self._wiring.transport.post_send(peer, cut.channel, pieces, done)
        else:
            done(None)

    def _on_sent(self, key: Key, number: int, error: TransferError | None) -> None:
        with self._lock:
            out = self._transfers[key]
            was_closed = out.is_closed
            out.sent(number, None if error is None else str(error))
            if error is not None and not was_closed:
                # The destination may have all that was sent, and would wait for more.
                self._close(key, out, f"sending failed: {error}")
            else:
                self._pump(key, out)

    def _close(self, key: Key, out: Outgoing, reason: str, error: str | None = None) -> None:
        out.close(error)
        self._wiring.send(out.peer, Cease(key[0], key[1], self._wiring.incarnation, reason[:500]))
        self._end(key, out)

    def _end(self, key: Key, out: Outgoing) -> None:
        if not out.is_over or self._transfers.pop(key, None) is None:
            return
        handoff_id, attempt = HandoffId(key[0]), key[1]
        if out.error is not None:
            self._wiring.report(Broken(handoff_id, attempt, out.error))
        else:
            self._wiring.report(Ceased(handoff_id, attempt) if out.ceased else Sent(handoff_id, attempt))

    def on_accept(self, peer: str, accept: Accept) -> bool:
        """False if nobody waits for it."""
        key = (accept.handoff_id, accept.attempt)
        out = self._find(peer, key)
        if out is None or out.is_accepted:
            return False
        try:
            out.accept(accept)
        except ValueError as error:
            self._close(key, out, str(error), error=str(error))
        else:
            self._pump(key, out)
        return True

    def on_refuse(self, peer: str, refuse: Refuse) -> None:
        key = (refuse.handoff_id, refuse.attempt)
        out = self._find(peer, key)
        if out is not None and not out.is_accepted:
            out.close(f"refused: {refuse.reason}")
            self._end(key, out)

    def on_cease(self, peer: str, cease: Cease) -> None:
        """The destination wants no more; it takes what was announced, the last segment too."""
        key = (cease.handoff_id, cease.attempt)
        out = self._find(peer, key)
        if out is not None and not out.is_closed:
            out.ceased = True
            self._close(key, out, "ceased by the destination")

    def forget(self, peer: str, reason: str) -> None:
        """Nothing goes to this peer any more; the transport ends what is under way."""
        for key, out in list(self._transfers.items()):
            if out.peer == peer:
                if not out.is_closed:
                    out.close(reason)
                self._end(key, out)

    def _find(self, peer: str, key: Key) -> Outgoing | None:
        out = self._transfers.get(key)
        return out if out is not None and out.peer == peer else None
