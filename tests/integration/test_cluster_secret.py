"""Who has another secret, or none, gets no connection to a node over UCX, and costs it next to nothing."""

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import structlog
from transport_nodes import SETTLE_S, Node, assert_moves, join, wait_until
from ucx_raw import NUMBER, RawPeer

from handoff.transports.base import MAX_MESSAGE_BYTES, PeerLost, Piece
from handoff.transports.ucx import UcxTransport
from handoff.transports.ucx_seal import SEAL_BYTES
from handoff.transports.ucx_wire import HELLO_TAG, message_tag, note_tag, offer_tag

SECRET, OTHER = b"s" * 32, b"t" * 32
PIECES = [Piece(0, 1000)]


@pytest.fixture
def node_with() -> Iterator[Callable[[str, bytes], Node]]:
    nodes: list[Node] = []

    def make(name: str, secret: bytes) -> Node:
        nodes.append(Node(name, UcxTransport(secret=secret)))
        return nodes[-1]

    yield make
    for node in nodes:
        node.transport.close()


@pytest.fixture
def pair(node_with: Callable[[str, bytes], Node]) -> tuple[Node, Node]:
    source, destination = node_with("source", SECRET), node_with("destination", SECRET)
    join(source, destination)
    return source, destination


@pytest.fixture
def raw_to() -> Iterator[Callable[[Node, bytes], RawPeer]]:
    peers: list[RawPeer] = []

    def make(node: Node, secret: bytes) -> RawPeer:
        peers.append(RawPeer(node.transport.address, secret))
        return peers[-1]

    yield make
    for peer in peers:
        peer.close()


def test_who_has_the_secret_is_served(pair: tuple[Node, Node]) -> None:
    pair[0].fill(1)
    assert_moves(*pair, 1, [100, 5000, 1 << 20])
    pair[0].transport.send_message("destination", b"hello")
    assert pair[1].wait_messages(1) == [("source", b"hello")]


@pytest.mark.parametrize("secret", [OTHER, b""], ids=["another", "none"])
@pytest.mark.parametrize("order", ["together", "left first", "right first"])
def test_another_secret_gets_no_connection(secret: bytes, order: str, node_with: Callable[[str, bytes], Node]) -> None:
    left, right = node_with("left", SECRET), node_with("right", secret)
    with structlog.testing.capture_logs() as logs:
        pairs = [(left, right), (right, left)]
        for side, peer in reversed(pairs) if order == "right first" else pairs:
            side.transport.connect(peer.name, peer.transport.address)
            side.transport.send_message(peer.name, b"let me in")
            if order != "together":
                time.sleep(SETTLE_S)
        outcomes = [left.send(right, 1, PIECES), left.receive(right, 2, PIECES), right.receive(left, 1, PIECES)]
        for outcome in outcomes:
            assert isinstance(outcome.wait(), PeerLost)
    assert (left.messages, right.messages) == ([], [])
    assert (left.transport.links(), right.transport.links()) == ([], [])
    refusals = [line for line in logs if line["event"].startswith("peer refused")]
    assert 1 <= len(refusals) <= 2


def test_a_peer_that_proves_the_secret_by_hand_is_let_in(
    node_with: Callable[[str, bytes], Node], raw_to: Callable[[Node, bytes], RawPeer]
) -> None:
    node = node_with("node", SECRET)
    raw = raw_to(node, SECRET)
    node.transport.connect("raw", raw.address)
    raw.shake_hands()
    raw.send_sealed(b"one")
    assert node.wait_messages(1) == [("raw", b"one")]


def test_a_frame_that_comes_again_is_dropped(
    node_with: Callable[[str, bytes], Node], raw_to: Callable[[Node, bytes], RawPeer]
) -> None:
    node = node_with("node", SECRET)
    raw = raw_to(node, SECRET)
    node.transport.connect("raw", raw.address)
    raw.shake_hands()
    first = raw.send_sealed(b"one")
    raw.send(*first)
    raw.send_sealed(b"two")
    raw.send(*first)
    raw.send(first[0], note_tag(raw.pairing.peer_number or 0))
    raw.send_sealed(b"three")
    assert node.wait_messages(3) == [("raw", b"one"), ("raw", b"two"), ("raw", b"three")]
    assert [link.peer for link in node.transport.links()] == ["raw"]


def test_a_missing_frame_ends_the_connection(
    node_with: Callable[[str, bytes], Node], raw_to: Callable[[Node, bytes], RawPeer]
) -> None:
    node = node_with("node", SECRET)
    raw = raw_to(node, SECRET)
    node.transport.connect("raw", raw.address)
    raw.shake_hands()
    raw.send_sealed(b"one")
    node.wait_messages(1)
    assert raw.seals is not None
    raw.seals[0].seal(message_tag(raw.pairing.peer_number or 0), b"never sent")
    raw.send_sealed(b"three")
    wait_until(lambda: node.transport.links() == [])
    assert node.messages == [("raw", b"one")]
    node.transport.connect("raw", raw.address)
    raw.fresh_pairing(NUMBER + 1)
    raw.shake_hands()
    raw.send_sealed(b"again")
    assert node.wait_messages(2)[1] == ("raw", b"again")


def test_recorded_hellos_open_nothing(
    node_with: Callable[[str, bytes], Node], raw_to: Callable[[Node, bytes], RawPeer]
) -> None:
    node = node_with("node", SECRET)
    raw = raw_to(node, SECRET)
    node.transport.connect("raw", raw.address)
    raw.shake_hands()
    raw.send_sealed(b"one")
    node.wait_messages(1)
    recorded = list(raw.hellos_sent)
    node.transport.connect("raw", raw.address)
    for frame in recorded * 2:
        raw.send(frame, HELLO_TAG)
    raw.progress_for(SETTLE_S)
    assert node.transport.links() == []
    # The peer itself gets in.
    raw.fresh_pairing(NUMBER + 1)
    raw.shake_hands()
    raw.send_sealed(b"two")
    assert node.wait_messages(2)[1] == ("raw", b"two")


def test_a_hello_in_the_name_of_a_connected_peer_changes_nothing(
    node_with: Callable[[str, bytes], Node], raw_to: Callable[[Node, bytes], RawPeer]
) -> None:
    node = node_with("node", SECRET)
    raw, impostor = raw_to(node, SECRET), raw_to(node, OTHER)
    node.transport.connect("raw", raw.address)
    raw.shake_hands()
    assert impostor.identity == raw.identity
    impostor.fresh_pairing(NUMBER + 1)
    impostor.say_hello(None)
    raw.progress_for(SETTLE_S)
    assert [link.peer for link in node.transport.links()] == ["raw"]
    raw.send_sealed(b"one")
    assert node.wait_messages(1) == [("raw", b"one")]


def test_a_hello_for_another_node_is_not_heard(
    node_with: Callable[[str, bytes], Node], raw_to: Callable[[Node, bytes], RawPeer]
) -> None:
    node, other = node_with("node", SECRET), node_with("other", SECRET)
    raw, same_raw = raw_to(node, SECRET), raw_to(other, SECRET)
    node.transport.connect("raw", raw.address)
    with structlog.testing.capture_logs() as logs:
        meant_for_other = same_raw.say_hello(None)
        raw.send(meant_for_other, HELLO_TAG)
        raw.progress_for(SETTLE_S)
    assert node.transport.links() == []
    assert [line for line in logs if line["log_level"] in ("warning", "error")] == []
    assert len(raw.heard) == 1, "it was answered"
    raw.shake_hands()
    raw.send_sealed(b"one")
    assert node.wait_messages(1) == [("raw", b"one")]


def test_a_flood_of_forged_frames_costs_little_and_harms_nobody(
    pair: tuple[Node, Node], raw_to: Callable[[Node, bytes], RawPeer], monkeypatch: pytest.MonkeyPatch
) -> None:
    # They load UCX, which is to read its settings first.
    from handoff.transports.ucx_peer import UcxPeer
    from handoff.transports.ucx_worker import UcxWorker

    source, destination = pair
    received: list[int] = []
    for owner, method in ((UcxWorker, "_take_apart"), (UcxPeer, "expect")):
        monkeypatch.setattr(owner, method, _noting(getattr(owner, method), received))
    source.fill(1)
    assert_moves(source, destination, 1, [100])
    stranger = raw_to(destination, OTHER)
    # Its number is nobody's business, but somebody may have read it on the wire.
    worker = destination.transport._worker  # type: ignore[attr-defined]
    (number,) = worker._by_number
    rng = np.random.default_rng(5)
    tags = [HELLO_TAG, HELLO_TAG | 1, message_tag(number), note_tag(number), offer_tag(number), message_tag(12345)]
    big = np.zeros(64 << 20, np.uint8)
    stranger.send(rng.bytes(100), HELLO_TAG)
    before = psutil.Process(os.getpid()).memory_info().rss
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            for tag in tags:
                for size in (1, SEAL_BYTES, SEAL_BYTES + 13, 200, 9000):
                    stranger.send(rng.bytes(size), tag)
                stranger.send(big, tag)
        for _ in range(20):
            stranger.identity = rng.bytes(8)
            stranger.say_hello(None)
        stranger.progress_for(SETTLE_S)
    source.transport.send_message("destination", b"still here")
    assert destination.wait_messages(1) == [("source", b"still here")]
    assert_moves(source, destination, 2, [100, 1 << 20])
    after = psutil.Process(os.getpid()).memory_info().rss
    assert after - before < 64 << 20
    assert max(received) < 10_000
    assert len(logs) < 10
    assert len(destination.transport.links()) == 1


def _noting(receive: Callable[[Any, Any], None], lengths: list[int]) -> Callable[[Any, Any], None]:
    """Also notes how long the frames are that are received as a whole."""

    def noting(self: Any, probe: Any) -> None:
        lengths.append(probe.length)
        receive(self, probe)

    return noting


def test_a_message_of_the_longest_size_still_fits(pair: tuple[Node, Node]) -> None:
    frame = bytes(MAX_MESSAGE_BYTES)
    pair[0].transport.send_message("destination", frame)
    assert pair[1].wait_messages(1) == [("source", frame)]
