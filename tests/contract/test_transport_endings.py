"""What `transports/base.py` promises of disconnecting, reconnecting and closing, run over every transport."""

import time
from collections.abc import Callable

import pytest
from transport_nodes import SETTLE_S, Make, Node, assert_moves, join, outside

from handoff.transports.base import PeerLost, Piece


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


def test_a_restarted_peer_while_both_sides_wait(pair: tuple[Node, Node], make_node: Callable[[str], Node]) -> None:
    """What the old one has posted ends, and its bytes don't land in what is posted anew on the same channels."""
    source, destination = pair
    pieces = [Piece(index << 16, 1 << 16) for index in range(64)]
    theirs = [source.send(destination, channel, pieces) for channel in (1, 2)] + [
        source.receive(destination, 3, pieces)
    ]
    ours = [destination.receive(source, 4, pieces), destination.send(source, 5, pieces)]
    fresh = make_node(source.name)
    fresh.fill(7)
    join(fresh, destination)
    for outcome in ours:
        assert isinstance(outcome.wait(), PeerLost)
    again = [
        (destination.receive(fresh, channel, pieces), fresh.send(destination, channel, pieces)) for channel in (1, 4)
    ]
    assert [outcome.wait() for both in again for outcome in both] == [None] * 4
    assert destination.taken(pieces) == fresh.taken(pieces)
    source.transport.close()
    assert all(isinstance(outcome.wait(), PeerLost) for outcome in theirs)
    assert destination.taken(pieces) == fresh.taken(pieces)


def test_a_peer_that_closes_ends_what_waits_for_it(pair: tuple[Node, Node], make_node: Callable[[str], Node]) -> None:
    """Without a disconnect on this side; other peers are served on."""
    source, destination = pair
    pieces = [Piece(index << 16, 1 << 16) for index in range(64)]
    waiting = [destination.receive(source, 1, pieces), destination.send(source, 2, pieces)]
    time.sleep(SETTLE_S)
    source.transport.close()
    assert all(isinstance(outcome.wait(), PeerLost) for outcome in waiting)
    other = make_node("other")
    other.fill(8)
    join(other, destination)
    assert_moves(other, destination, 1, [100_000, 5])
