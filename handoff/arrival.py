"""One segment on its way into this node."""

from collections.abc import Sequence
from dataclasses import dataclass

from handoff.transfer_in import Incoming
from handoff.transports.base import Done, Piece, TransferError
from handoff.wire import Segment
from handoff.wiring import Wiring, stretches


class WrongBytes(TransferError):
    """All bytes came, but they are not those that the source meant to send: its attempt has failed."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """slot_pieces: what comes behind the blocks. done: called once, with quiet memory."""

    peer: str
    segment: Segment
    incoming: Incoming
    slot_pieces: Sequence[Piece]
    done: Done

    def post(self, wiring: Wiring, pieces: Sequence[Piece], landed: Done) -> None:
        """Receive `pieces` and what comes behind them; called with the lock held."""
        pieces = [*pieces, *self.slot_pieces]
        size = sum(piece.length for piece in pieces)
        self.incoming.bytes_moved += size
        self.incoming.exposed_bytes = size
        if pieces:
            channel = (self.incoming.channel + self.segment.number) % 2**32
            wiring.transport.post_receive(self.peer, channel, pieces, landed)
        else:
            landed(None)

    def verify(self, wiring: Wiring, block_bytes: int, blocks: Sequence[int], origin: int = 0) -> WrongBytes | None:
        """Whether these blocks, as they lie here now, are what was sent; see ContentHash."""
        assert self.incoming.offer is not None
        mode, behind = self.incoming.offer.checksums, stretches(self.slot_pieces)
        part = wiring.layout.part(self.segment.layers)
        if wiring.content.of(mode, block_bytes, blocks, behind, origin, part) == self.segment.checksum:
            return None
        return WrongBytes(f"the bytes of segment {self.segment.number} are not those that were sent: checksums differ")
