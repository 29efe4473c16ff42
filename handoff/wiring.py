"""What both halves of an exchange work with: the transport, the pool's layout and content, the outgoing messages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from handoff.checksum import Checksums, ContentHash
from handoff.compatibility import Compatibility
from handoff.pool_layout import PoolLayout
from handoff.relayout.path import staged_route
from handoff.relayout.routes import Route
from handoff.transfer_ends import TransferEnd
from handoff.transports.base import Piece, Transport
from handoff.wire import Layers, Message, encode
from scheduler.ids import NodeId


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """What a node must know of another to exchange KV with it."""

    node: NodeId
    incarnation: int
    address: bytes
    compatibility: Compatibility


class Wiring:
    """peers: by name, those that are connected. digest_of: of an adapter by its name; empty for none."""

    def __init__(
        self,
        incarnation: int,
        transport: Transport,
        compatibility: Compatibility,
        layout: PoolLayout,
        report: Callable[[TransferEnd], None],
        clock: Callable[[], float],
        adapter_digest: Callable[[str], str],
        checksums: Checksums,
    ) -> None:
        self.peers: dict[str, PeerInfo] = {}
        self.incarnation = incarnation
        self.transport = transport
        self.compatibility = compatibility
        self.layout = layout
        self.report = report
        self.clock = clock
        self._adapter_digest = adapter_digest
        self.checksums = checksums

    def start(self, pool: Any) -> None:
        self.pool = pool
        self.content = ContentHash(pool)

    def route_to(self, peer: str) -> Route | None:
        """None if blocks go there as they are. Raises IncompatiblePeer."""
        return staged_route(self.compatibility, self.peers[peer].compatibility, peer)

    def route_from(self, peer: str) -> Route | None:
        """None if blocks come from there as they are. Raises IncompatiblePeer."""
        return staged_route(self.peers[peer].compatibility, self.compatibility, peer)

    def send(self, peer: str, message: Message) -> None:
        """Raises WireError when the message is too long for a frame."""
        self.transport.send_message(peer, encode(message))

    def digest_of(self, adapter: str | None) -> str:
        return "" if adapter is None else self._adapter_digest(adapter)

    def slot_pieces(self, slot: int) -> list[Piece]:
        """The record behind the blocks: the state is final only when all KV is."""
        return [self.layout.slot_piece(slot)] if self.layout.slot_bytes else []

    def checksum(
        self, mode: Checksums, blocks: Sequence[int], slot_pieces: Sequence[Piece], layers: Layers | None = None
    ) -> int:
        """Of our own blocks."""
        layout = self.layout
        return self.content.of(mode, layout.block_bytes, blocks, stretches(slot_pieces), part=layout.part(layers))

    def lane(self, peer: str) -> str:
        return next((link.lane for link in self.transport.links() if link.peer == peer), "unknown")


def stretches(pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    return [(piece.offset, piece.length) for piece in pieces]
