"""What `transports/base.py` promises of messages and links, run over every transport, in one process."""

import time
from collections.abc import Callable

import numpy as np
from transport_nodes import SETTLE_S, TIMEOUT_S, Node, Outcome, assert_moves, join

from handoff.transports.base import MAX_MESSAGE_BYTES, PeerLost, Piece


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


def test_links_name_the_lane_of_each_peer(pair: tuple[Node, Node], way: str) -> None:
    source, destination = pair
    assert_moves(source, destination, 1, [100])
    (link,) = source.transport.links()
    assert link.peer == destination.name
    if way == "ucx":
        assert link.lane not in ("", "unknown", "shm", "cma")
    else:
        assert link.lane == way.removeprefix("ucx-")
    assert (link.warning is not None) == (link.lane == "tcp")
    source.transport.disconnect(destination.name)
    deadline = time.monotonic() + TIMEOUT_S
    while source.transport.links() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert source.transport.links() == []
