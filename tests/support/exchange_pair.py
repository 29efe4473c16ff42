"""Two exchanges over transports that do nothing by themselves: tests deliver frames and move bytes."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from kv_machine import KvMachine

from handoff.compatibility import Compatibility
from handoff.exchange import Exchange
from handoff.pool_layout import PoolLayout
from handoff.transfer_ends import Broken, TransferEnd
from handoff.transports.base import Done, Link, OnMessage, PeerLost, Piece, TransferError
from handoff.wire import Message, decode
from scheduler.decode_scheduler import ReservedKv
from scheduler.ids import BlockId, HandoffId, NodeId, RequestId
from scheduler.prefill_scheduler import HeldKv

P, D = NodeId("prefill-0"), NodeId("decode-0")
H = HandoffId("h")
BLOCK_BYTES = 32
TOKENS = 10
LAYERS = 4
LAYOUT = PoolLayout(BLOCK_BYTES, layers=LAYERS)
COMPATIBILITY = Compatibility.of(KvMachine(4, 4).facts(), protocol=1)


class ManualTransport:
    """A `Transport` that does nothing by itself: tests deliver its frames and end its operations."""

    name = "manual"
    address = b"manual"

    def __init__(self) -> None:
        self.frames: deque[tuple[str, bytes]] = deque()
        self.sends: list[tuple[str, int, list[Piece], Done]] = []
        self.receives: list[tuple[str, int, list[Piece], Done]] = []
        self.connected: list[str] = []

    def start(self, node: str, pool: Any, on_message: OnMessage) -> None:
        self.on_message = on_message
        self.pool = pool

    def connect(self, peer: str, address: bytes) -> None:
        self.connected.append(peer)

    def disconnect(self, peer: str) -> None:
        """Ends what is posted, as the contract says."""
        self.connected.remove(peer)
        for posted in (self.sends, self.receives):
            for operation in [o for o in posted if o[0] == peer]:
                posted.remove(operation)
                operation[3](PeerLost(f"{peer} was disconnected"))

    def send_message(self, peer: str, frame: bytes) -> None:
        self.frames.append((peer, frame))

    def post_send(self, peer: str, channel: int, pieces: Sequence[Piece], done: Done) -> None:
        self.sends.append((peer, channel, list(pieces), done))

    def post_receive(self, peer: str, channel: int, pieces: Sequence[Piece], done: Done) -> None:
        self.receives.append((peer, channel, list(pieces), done))

    def links(self) -> list[Link]:
        return [Link(peer, "manual") for peer in self.connected]

    def close(self) -> None:
        for peer in list(self.connected):
            self.disconnect(peer)


class Side:
    """One node's exchange, its transport and what it reported."""

    def __init__(
        self,
        node: NodeId,
        incarnation: int = 1,
        compatibility: Compatibility = COMPATIBILITY,
        layout: PoolLayout = LAYOUT,
    ) -> None:
        self.transport = ManualTransport()
        self.ends: list[TransferEnd] = []
        self.now = 10.0
        self.exchange = Exchange(
            node, incarnation, self.transport, compatibility, layout, self.ends.append, lambda: self.now
        )
        self.exchange.start(np.zeros(64 * BLOCK_BYTES, np.uint8))

    def send(self, *blocks: int, attempt: int = 1, name: HandoffId = H, to: NodeId = D) -> None:
        """Offer held blocks and send them as soon as they are accepted."""
        self.exchange.offer(to, name, attempt, RequestId("r"), TOKENS)
        self.exchange.complete(name, attempt, held(*blocks))


class Pair:
    def __init__(self, destination: Side | None = None) -> None:
        self.source, self.destination = Side(P), destination or Side(D)
        self.source.exchange.connect(self.destination.exchange.info)
        self.destination.exchange.connect(self.source.exchange.info)

    def deliver(self) -> list[Message]:
        """Deliver all frames; returns them."""
        delivered = []
        while self.source.transport.frames or self.destination.transport.frames:
            for origin, name, target in ((self.source, P, self.destination), (self.destination, D, self.source)):
                while origin.transport.frames:
                    _, frame = origin.transport.frames.popleft()
                    delivered.append(decode(frame))
                    target.transport.on_message(name, frame)
        return delivered

    def move(self, error: TransferError | None = None) -> None:
        """End what both sides have posted, with the bytes moved unless it fails."""
        out, into = self.source.transport, self.destination.transport
        receives = {operation[1]: operation for operation in into.receives}
        for send in [operation for operation in out.sends if operation[1] in receives]:
            receive = receives[send[1]]
            # What follows from the ends is posted anew.
            out.sends.remove(send)
            into.receives.remove(receive)
            self._copy(send[2] if error is None else [], receive[2])
            receive[3](error)
            send[3](error)

    def _copy(self, sent: list[Piece], received: list[Piece]) -> None:
        for source, target in zip(sent, received, strict=bool(sent)):
            moved = self.source.transport.pool[source.offset : source.offset + source.length]
            self.destination.transport.pool[target.offset : target.offset + target.length] = moved

    @property
    def ends(self) -> tuple[list[TransferEnd], list[TransferEnd]]:
        return self.source.ends, self.destination.ends


def held(*blocks: int, prompt_tokens: int = TOKENS, adapter: str | None = None, generation: int = 0) -> HeldKv:
    table = tuple(BlockId(block) for block in blocks)
    return HeldKv(RequestId("r"), prompt_tokens, 42, table, adapter=adapter, generation=generation)


def reserved(
    *blocks: int,
    cached: int = 0,
    prompt_tokens: int = TOKENS,
    adapter: str | None = None,
    source: NodeId | None = None,
) -> ReservedKv:
    table = tuple(BlockId(block) for block in blocks)
    return ReservedKv(RequestId("r"), prompt_tokens, table, cached, adapter=adapter, source=source)


def reasons(ends: list[TransferEnd]) -> list[str]:
    return [end.reason for end in ends if isinstance(end, Broken)]
