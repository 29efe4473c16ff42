"""A re-layout between the ranks of two replicas over real transports: every rank is a node with a pool of its own."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate

import pytest
from kv_pattern import RankPools, differing, pattern, widened

from handoff.relayout.copies import pack, unpack
from handoff.relayout.pieces import pieces_of_pool, pieces_of_staging
from handoff.relayout.routes import Route, routes
from handoff.relayout.shape import KvShape
from handoff.relayout.windows import Window, windows
from handoff.transports.base import Piece, TransferError, Transport
from handoff.transports.memory import MemoryFabric, MemoryTransport
from handoff.transports.ucx import UcxTransport

TIMEOUT_S = 20.0
STAGED = 2
TOKENS = range(24, 101)
MEMORY = [(1, 8), (8, 1), (2, 4), (4, 2), (8, 4), (4, 8)]


@dataclass
class Replica:
    """The nodes of all ranks of one side. areas: per route, where its part of a rank's staging area begins."""

    name: str
    held: RankPools
    nodes: list[Transport]
    areas: dict[tuple[int, int], int]

    @classmethod
    def start(cls, name: str, shape: KvShape, make: Callable[[], Transport], plan: list[Route], side: int) -> "Replica":
        """side: 0 of the sources, 1 of the destinations."""
        areas: dict[tuple[int, int], int] = {}
        longest = 0
        for rank in range(shape.ranks):
            own = [route for route in plan if route.key[side] == rank]
            ends = list(accumulate((STAGED * route.staged_block_bytes for route in own), initial=0))
            areas.update(zip((route.key for route in own), ends[:-1], strict=True))
            longest = max(longest, ends[-1])
        held = RankPools(shape, TOKENS.stop, seed=side + 1, staging=longest)
        nodes = [make() for _ in held.memories]
        for rank, (node, memory) in enumerate(zip(nodes, held.memories, strict=True)):
            node.start(f"{name}-{rank}", memory, lambda peer, frame: None)
        return cls(name, held, nodes, {key: held.pools[key[side]].size + offset for key, offset in areas.items()})

    def connect(self, other: "Replica") -> None:
        for node in self.nodes:
            for rank, peer in enumerate(other.nodes):
                node.connect(f"{other.name}-{rank}", peer.address)

    def close(self) -> None:
        for node in self.nodes:
            node.close()


class Move:
    """Both replicas, and the transfer of a window over every route at once."""

    def __init__(self, source: KvShape, destination: KvShape, make: Callable[[], Transport]) -> None:
        self.plan = list(routes(source, destination, turn=1).values())
        self.source = Replica.start("p", source, make, self.plan, 0)
        self.destination = Replica.start("d", destination, make, self.plan, 1)
        self.source.connect(self.destination)
        self.destination.connect(self.source)

    def pieces(self, route: Route, window: Window) -> tuple[list[Piece], list[Piece]]:
        """Of the source, packed if need be, and of the destination."""
        blocks = [self.source.held.blocks[index] for index in window.blocks]
        own, area = self.source.areas[route.key], self.destination.areas[route.key]
        if route.whole:
            return pieces_of_pool(route, blocks, area)
        rank, size = route.source.rank, len(blocks) * route.staged_block_bytes
        pack(self.source.held.pools[rank], route, blocks, self.source.held.memories[rank][own : own + size])
        return pieces_of_staging(route, len(blocks), own), pieces_of_staging(route, len(blocks), area)

    def window(self, window: Window) -> None:
        waits: list[Future[TransferError | None]] = []
        for channel, route in enumerate(self.plan):
            (s, d), (sends, receives) = route.key, self.pieces(route, window)
            waits += [landed := Future(), sent := Future()]
            self.destination.nodes[d].post_receive(f"p-{s}", channel, receives, landed.set_result)
            self.source.nodes[s].post_send(f"d-{d}", channel, sends, sent.set_result)
        assert [wait.result(TIMEOUT_S) for wait in waits] == [None] * len(waits)
        for route in self.plan:
            rank, area = route.key[1], self.destination.areas[route.key]
            staging = self.destination.held.memories[rank][area : area + len(window.blocks) * route.staged_block_bytes]
            unpack(staging, route, window, self.destination.held.blocks, self.destination.held.pools[rank])

    def close(self) -> None:
        self.source.close()
        self.destination.close()


@pytest.fixture
def start() -> Iterator[Callable[[KvShape, KvShape, Callable[[], Transport]], Move]]:
    moves: list[Move] = []

    def make_move(source: KvShape, destination: KvShape, make: Callable[[], Transport]) -> Move:
        moves.append(Move(source, destination, make))
        return moves[-1]

    yield make_move
    for move in moves:
        move.close()


@pytest.mark.parametrize(
    ("transport", "sources", "destinations"), [*(("memory", *ranks) for ranks in MEMORY), ("ucx", 2, 4), ("ucx", 2, 1)]
)
def test_every_rank_gets_its_heads_in_its_own_blocks(
    transport: str, sources: int, destinations: int, start: Callable[..., Move]
) -> None:
    fabric = MemoryFabric()
    source = KvShape(layers=3, kv_heads=4, head_dim=8, block_size=16, dtype="bf16", ranks=sources)
    destination = KvShape(layers=3, kv_heads=4, head_dim=8, block_size=24, dtype="fp32", ranks=destinations)
    move = start(source, destination, UcxTransport if transport == "ucx" else lambda: MemoryTransport(fabric))
    truth = pattern(5, 3, 4, TOKENS.stop, 8, "bf16")
    move.source.held.put(truth, range(TOKENS.stop))
    wanted = RankPools(destination, TOKENS.stop, seed=2)
    wanted.put(widened(truth, "bf16", "fp32"), TOKENS)
    plan = windows(16, 24, TOKENS, STAGED)
    assert len(plan) > 2
    for window in plan:
        move.window(window)
    assert not differing(move.destination.held, wanted)
