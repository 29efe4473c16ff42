"""What `transports/base.py` promises, run over every transport, in one process."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from handoff.transports.base import MAX_MESSAGE_BYTES, PeerLost, Piece, TransferError, Transport
from handoff.transports.memory import MemoryFabric, MemoryTransport
from handoff.transports.ucx import UcxTransport

TIMEOUT_S = 20.0
SETTLE_S = 0.2
POOL_BYTES = 24 << 20
Make = Callable[[], Transport]


class Outcome:
    """A `done` callback that records what it was called with, and on which thread."""

    def __init__(self) -> None:
        self.calls: list[TransferError | None] = []
        self.threads: list[str] = []
        self._called = threading.Event()

    def __call__(self, error: TransferError | None) -> None:
        self.calls.append(error)
        self.threads.append(threading.current_thread().name)
        self._called.set()

    def wait(self) -> TransferError | None:
        assert self._called.wait(TIMEOUT_S), "the callback was not called"
        return self.calls[0]


class Node:
    def __init__(self, name: str, transport: Transport) -> None:
        self.name = name
        self.transport = transport
        self.pool: npt.NDArray[np.uint8] = np.zeros(POOL_BYTES, np.uint8)
        self.messages: list[tuple[str, bytes]] = []
        self._arrived = threading.Condition()
        transport.start(name, self.pool, self._on_message)

    def _on_message(self, peer: str, frame: bytes) -> None:
        with self._arrived:
            self.messages.append((peer, frame))
            self._arrived.notify_all()

    def wait_messages(self, count: int) -> list[tuple[str, bytes]]:
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.messages) >= count, TIMEOUT_S)
            return list(self.messages)

    def send(self, to: "Node", channel: int, pieces: Sequence[Piece]) -> Outcome:
        outcome = Outcome()
        self.transport.post_send(to.name, channel, pieces, outcome)
        return outcome

    def receive(self, source: "Node", channel: int, pieces: Sequence[Piece]) -> Outcome:
        outcome = Outcome()
        self.transport.post_receive(source.name, channel, pieces, outcome)
        return outcome

    def fill(self, seed: int) -> None:
        self.pool[:] = np.random.default_rng(seed).integers(0, 256, POOL_BYTES, np.uint8)

    def taken(self, pieces: Sequence[Piece]) -> bytes:
        return b"".join(self.pool[p.offset : p.offset + p.length].tobytes() for p in pieces)


def join(left: Node, right: Node) -> None:
    left.transport.connect(right.name, right.transport.address)
    right.transport.connect(left.name, left.transport.address)


@pytest.fixture(params=["memory", "ucx"])
def make_transport(request: pytest.FixtureRequest) -> Make:
    if request.param == "ucx":
        return UcxTransport
    fabric = MemoryFabric()
    return lambda: MemoryTransport(fabric)


@pytest.fixture
def make_node(make_transport: Make) -> Iterator[Callable[[str], Node]]:
    nodes: list[Node] = []

    def make(name: str) -> Node:
        nodes.append(Node(name, make_transport()))
        return nodes[-1]

    yield make
    for node in nodes:
        node.transport.close()
    assert not [t.name for t in threading.enumerate() if t.name.startswith(("ucx-", "memory-"))]


@pytest.fixture
def pair(make_node: Callable[[str], Node]) -> tuple[Node, Node]:
    """(source, destination), joined; the source's pool is random, the destination's is zero."""
    source, destination = make_node("source"), make_node("destination")
    source.fill(1)
    join(source, destination)
    return source, destination


def scattered(lengths: Sequence[int], seed: int) -> list[Piece]:
    """Pieces of these lengths in random order over the pool, with gaps, none overlapping."""
    rng = np.random.default_rng(seed)
    order, pieces, offset = rng.permutation(len(lengths)), {}, 0
    for index in order:
        offset += int(rng.integers(1, 100))
        pieces[int(index)] = Piece(offset, lengths[index])
        offset += lengths[index]
    assert offset <= POOL_BYTES
    return [pieces[index] for index in range(len(lengths))]


def outside(pool: npt.NDArray[np.uint8], pieces: Sequence[Piece]) -> npt.NDArray[np.uint8]:
    """The bytes that belong to no piece."""
    mask = np.ones(len(pool), bool)
    for piece in pieces:
        mask[piece.offset : piece.offset + piece.length] = False
    return pool[mask]


def assert_moves(source: Node, destination: Node, channel: int, lengths: Sequence[int]) -> None:
    sent, received = scattered(lengths, 2), scattered(lengths, 3)
    destination.pool[:] = 0
    outcomes = [destination.receive(source, channel, received), source.send(destination, channel, sent)]
    assert [outcome.wait() for outcome in outcomes] == [None, None]
    assert destination.taken(received) == source.taken(sent)
    assert not outside(destination.pool, received).any()


@pytest.mark.parametrize(
    "lengths",
    [
        [1],
        [1, 7, 4095, 8191, 8192, 8193],
        [8 << 20],
        [8 << 20, 1, 360 << 10, 16 << 10],
        [64 << 10] * 100,
        [1000 + index % 17 for index in range(2000)],
        [16 << 10] * 300 + [100] * 300,
    ],
    ids=["byte", "edges", "8MiB", "mixed", "100x64KiB", "2000-small", "two-sizes"],
)
def test_pieces_arrive_exactly(pair: tuple[Node, Node], lengths: list[int]) -> None:
    assert_moves(*pair, channel=5, lengths=lengths)


def test_ten_thousand_pieces(pair: tuple[Node, Node]) -> None:
    assert_moves(*pair, channel=2**32 - 1, lengths=[200] * 10_000)


@pytest.mark.parametrize("length", [100, 1 << 20])
@pytest.mark.parametrize("first", ["send", "receive"])
def test_either_side_may_post_first(pair: tuple[Node, Node], first: str, length: int) -> None:
    source, destination = pair
    pieces = [Piece(length * index, length) for index in range(3)]
    if first == "send":
        sent = source.send(destination, 1, pieces)
        time.sleep(SETTLE_S)
        received = destination.receive(source, 1, pieces)
    else:
        received = destination.receive(source, 1, pieces)
        time.sleep(SETTLE_S)
        assert received.calls == []
        sent = source.send(destination, 1, pieces)
    assert received.wait() is None
    assert sent.wait() is None
    assert destination.taken(pieces) == source.taken(pieces)


def test_channels_do_not_wait_for_each_other(pair: tuple[Node, Node]) -> None:
    """More is sent on channels that nobody receives on yet than may be in flight, and a later channel still moves."""
    source, destination = pair
    early = {channel: scattered([20_000] * 100, channel) for channel in range(4)}
    sends = {channel: source.send(destination, channel, pieces) for channel, pieces in early.items()}
    late = [Piece(20 << 20, 1 << 20)]
    late_send = source.send(destination, 9, late)
    assert destination.receive(source, 9, late).wait() is None
    assert late_send.wait() is None
    for channel in reversed(range(4)):
        pieces = scattered([20_000] * 100, 10 + channel)
        assert destination.receive(source, channel, pieces).wait() is None
        assert sends[channel].wait() is None
        assert destination.taken(pieces) == source.taken(early[channel])


def test_both_directions_at_once_on_one_channel_number(pair: tuple[Node, Node]) -> None:
    left, right = pair
    half = POOL_BYTES // 2
    right.pool[half:] = np.random.default_rng(5).integers(0, 256, half, np.uint8)
    low = [Piece(index << 20, 1 << 20) for index in range(8)]
    high = [Piece(half + (index << 20), 1 << 20) for index in range(8)]
    outcomes = [left.receive(right, 3, high), right.receive(left, 3, low)]
    outcomes += [left.send(right, 3, low), right.send(left, 3, high)]
    assert [outcome.wait() for outcome in outcomes] == [None] * 4
    assert right.taken(low) == left.taken(low)
    assert left.taken(high) == right.taken(high)


def test_messages_keep_their_order(pair: tuple[Node, Node]) -> None:
    source, destination = pair
    rng = np.random.default_rng(7)
    sizes = [1, MAX_MESSAGE_BYTES, 10, 9000, 8192, 3, 200_000, *rng.integers(1, 20_000, 500)]
    frames = [index.to_bytes(4, "little") + rng.bytes(max(int(size) - 4, 0)) for index, size in enumerate(sizes)]
    for frame in frames:
        source.transport.send_message(destination.name, frame)
    assert destination.wait_messages(len(frames)) == [(source.name, frame) for frame in frames]


def test_messages_and_pieces_of_two_peers_do_not_mix(make_node: Callable[[str], Node]) -> None:
    hub, left, right = make_node("hub"), make_node("left"), make_node("right")
    join(hub, left)
    join(hub, right)
    targets, received = {}, {}
    for index, node in enumerate((left, right)):
        node.fill(index)
        targets[node.name] = [Piece((index * 8 + k) << 20, 1 << 20) for k in range(8)]
        received[node.name] = hub.receive(node, 4, targets[node.name])
    pieces = [Piece(k << 20, 1 << 20) for k in range(8)]
    for node in (right, left):
        node.transport.send_message(hub.name, node.name.encode())
        assert node.send(hub, 4, pieces).wait() is None
    for node in (left, right):
        assert received[node.name].wait() is None
        assert hub.taken(targets[node.name]) == node.taken(pieces)
    assert sorted(hub.wait_messages(2)) == [("left", b"left"), ("right", b"right")]


def test_callbacks_run_once_on_the_transports_thread(pair: tuple[Node, Node]) -> None:
    source, destination = pair
    pieces = [Piece(0, 100_000), Piece(200_000, 50)]
    outcomes = []
    for channel in range(50):
        outcomes += [destination.receive(source, channel, pieces), source.send(destination, channel, pieces)]
    for outcome in outcomes:
        outcome.wait()
    source.transport.close()
    destination.transport.close()
    assert {len(outcome.calls) for outcome in outcomes} == {1}
    assert {name.split("-")[-1] for outcome in outcomes for name in outcome.threads} == {"source", "destination"}


def test_a_raising_callback_does_not_end_the_transport(pair: tuple[Node, Node]) -> None:
    source, destination = pair
    called = threading.Event()

    def broken(error: TransferError | None) -> None:
        called.set()
        raise RuntimeError("a bug of the caller")

    destination.transport.post_receive(source.name, 1, [Piece(0, 10)], broken)
    source.send(destination, 1, [Piece(0, 10)])
    assert called.wait(TIMEOUT_S)
    assert_moves(source, destination, 2, [10])


def test_disconnect_ends_pending_operations_once(pair: tuple[Node, Node]) -> None:
    source, destination = pair
    pieces = [Piece(index << 16, 1 << 16) for index in range(100)]
    outcomes = [destination.receive(source, channel, pieces) for channel in range(5)]
    outcomes += [destination.send(source, channel, pieces) for channel in range(5)]
    destination.transport.disconnect(source.name)
    for outcome in outcomes:
        assert isinstance(outcome.wait(), PeerLost)
    time.sleep(SETTLE_S)
    assert {len(outcome.calls) for outcome in outcomes} == {1}


@pytest.mark.parametrize("length", [500, 1 << 16])
def test_bytes_sent_after_a_disconnect_do_not_land(pair: tuple[Node, Node], length: int) -> None:
    source, destination = pair
    pieces = [Piece(index * length, length) for index in range(80)]
    first = source.send(destination, 1, pieces[:1])
    assert destination.receive(source, 1, pieces[:1]).wait() is None
    assert first.wait() is None
    destination.pool[:] = 0
    stale = destination.receive(source, 2, pieces)
    destination.transport.disconnect(source.name)
    assert isinstance(stale.wait(), PeerLost)
    late = source.send(destination, 2, pieces)
    time.sleep(SETTLE_S)
    assert not destination.pool.any()
    source.transport.disconnect(destination.name)
    late.wait()
    # The same channel again, over a new connection: only its own bytes arrive.
    source.fill(99)
    join(source, destination)
    again = destination.receive(source, 2, pieces)
    sent = source.send(destination, 2, pieces)
    assert again.wait() is None
    assert sent.wait() is None
    assert destination.taken(pieces) == source.taken(pieces)
    assert not outside(destination.pool, pieces).any()


@pytest.mark.parametrize("order", ["source", "destination", "replace", "replace-reversed"])
def test_reconnecting(pair: tuple[Node, Node], order: str) -> None:
    source, destination = pair
    for round_ in range(8):
        assert_moves(source, destination, 1, [300_000, 20, 9000])
        stuck = [source.send(destination, 7, [Piece(0, 500)]), destination.receive(source, 8, [Piece(0, 500_000)])]
        first, second = (source, destination) if order in ("source", "replace") else (destination, source)
        if not order.startswith("replace"):
            first.transport.disconnect(second.name)
            second.transport.disconnect(first.name)
        join(first, second)
        assert stuck[0].wait() is None or isinstance(stuck[0].wait(), PeerLost)
        assert isinstance(stuck[1].wait(), PeerLost)
        source.transport.send_message(destination.name, b"%d" % round_)
        assert destination.wait_messages(round_ + 1)[-1] == (source.name, b"%d" % round_)


def test_a_restarted_peer_replaces_the_old_one(pair: tuple[Node, Node], make_node: Callable[[str], Node]) -> None:
    source, destination = pair
    assert_moves(source, destination, 1, [100_000])
    stuck = destination.receive(source, 2, [Piece(0, 100)])
    source.transport.close()
    fresh = make_node("source")
    fresh.fill(4)
    join(fresh, destination)
    assert isinstance(stuck.wait(), PeerLost)
    assert_moves(fresh, destination, 2, [100_000, 5])


def test_unknown_peers(pair: tuple[Node, Node]) -> None:
    source, destination = pair
    for post in (source.transport.post_send, source.transport.post_receive):
        outcome = Outcome()
        post("nobody", 1, [Piece(0, 10)], outcome)
        assert isinstance(outcome.wait(), PeerLost)
    source.transport.send_message("nobody", b"x")
    source.transport.disconnect("nobody")
    source.transport.send_message(destination.name, b"still here")
    assert destination.wait_messages(1) == [("source", b"still here")]


def test_what_is_sent_before_the_peer_has_connected_waits(make_node: Callable[[str], Node]) -> None:
    source, destination = make_node("source"), make_node("destination")
    source.fill(3)
    source.transport.connect(destination.name, destination.transport.address)
    source.transport.send_message(destination.name, b"early")
    sent = source.send(destination, 1, [Piece(0, 1000)])
    time.sleep(SETTLE_S)
    assert sent.calls == []
    assert destination.messages == []
    destination.transport.connect(source.name, source.transport.address)
    assert destination.wait_messages(1) == [("source", b"early")]
    assert destination.receive(source, 1, [Piece(0, 1000)]).wait() is None
    assert sent.wait() is None


def test_close_ends_what_is_pending_and_is_idempotent(pair: tuple[Node, Node]) -> None:
    source, destination = pair
    pieces = [Piece(index << 16, 1 << 16) for index in range(200)]
    outcomes = [destination.receive(source, channel, pieces) for channel in range(3)]
    outcomes += [destination.send(source, channel, pieces) for channel in range(3)]
    start = time.monotonic()
    destination.transport.close()
    destination.transport.close()
    assert time.monotonic() - start < 5
    assert all(isinstance(outcome.wait(), PeerLost) for outcome in outcomes)
    late = destination.receive(source, 9, pieces)
    assert isinstance(late.wait(), PeerLost)
    assert {len(outcome.calls) for outcome in (*outcomes, late)} == {1}
    destination.transport.disconnect(source.name)
    destination.transport.send_message(source.name, b"nothing happens")
    assert destination.transport.links() == []


def test_closing_without_starting(make_transport: Make) -> None:
    make_transport().close()


def test_links_name_the_lane_of_each_peer(pair: tuple[Node, Node]) -> None:
    source, destination = pair
    assert_moves(source, destination, 1, [100])
    (link,) = source.transport.links()
    assert link.peer == destination.name
    assert link.lane == "memory" if source.transport.name == "memory" else link.lane not in ("", "unknown")
    assert (link.warning is not None) == (link.lane == "tcp")
    source.transport.disconnect(destination.name)
    deadline = time.monotonic() + TIMEOUT_S
    while source.transport.links() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert source.transport.links() == []


@pytest.mark.parametrize("piece", [Piece(0, 0), Piece(-1, 10), Piece(POOL_BYTES - 9, 10)])
def test_pieces_outside_the_pool_are_refused(pair: tuple[Node, Node], piece: Piece) -> None:
    source, destination = pair
    for node, peer in ((source, destination), (destination, source)):
        with pytest.raises(ValueError, match="reaches outside the pool"):
            node.transport.post_send(peer.name, 1, [piece], Outcome())
        with pytest.raises(ValueError, match="reaches outside the pool"):
            node.transport.post_receive(peer.name, 1, [Piece(0, 5), piece], Outcome())


def test_bad_channels_messages_and_pools_are_refused(make_transport: Make, pair: tuple[Node, Node]) -> None:
    source, destination = pair
    with pytest.raises(ValueError, match="channel"):
        source.send(destination, 2**32, [Piece(0, 1)])
    with pytest.raises(ValueError, match="no pieces"):
        source.send(destination, 1, [])
    with pytest.raises(ValueError, match="message"):
        source.transport.send_message(destination.name, b"x" * (MAX_MESSAGE_BYTES + 1))
    for pool in (np.zeros(10, np.int32), np.zeros((2, 5), np.uint8), np.zeros(20, np.uint8)[::2], bytearray(10)):
        with pytest.raises(TypeError):
            make_transport().start("bad", pool, lambda peer, frame: None)
