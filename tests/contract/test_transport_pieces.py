"""What `transports/base.py` promises of pieces, run over every transport, in one process."""

import queue
import threading
import time

import numpy as np
import pytest
from transport_nodes import POOL_BYTES, SETTLE_S, TIMEOUT_S, Make, Node, Outcome, assert_moves, scattered

from handoff.transports import shared_copy, ucx_transfer
from handoff.transports.base import MAX_MESSAGE_BYTES, Piece, TransferError


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


def test_a_small_operation_does_not_wait_for_a_long_one(
    pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Posted behind one of 320 pieces, it ends when the long one has moved a few windows, here of 16 pieces."""
    monkeypatch.setattr(ucx_transfer, "WINDOW_BYTES", 16 << 16)
    monkeypatch.setattr(shared_copy, "SLICE_BYTES", 16 << 16)
    source, destination = pair
    source.pool[:] = 1
    long, small = [Piece(index << 16, 1 << 16) for index in range(320)], [Piece(320 << 16, 360 << 10)]
    moved: queue.SimpleQueue[int] = queue.SimpleQueue()
    received = destination.receive(source, 1, long)
    destination.transport.post_receive(
        source.name, 2, small, lambda error: moved.put(int(destination.pool[: 320 << 16].sum()))
    )
    outcomes: list[Outcome] = []

    def send_both(error: TransferError | None) -> None:
        """On the transport's thread: so that both are posted before anything moves."""
        outcomes.extend((source.send(destination, 1, long), source.send(destination, 2, small)))

    source.transport.post_receive("nobody", 1, small, send_both)
    assert moved.get(timeout=TIMEOUT_S) <= 4 * (16 << 16)
    assert received.wait() is None
    assert [outcome.wait() for outcome in outcomes] == [None, None]


def test_a_sender_does_not_flood_a_receiver_that_posts_nothing(pair: tuple[Node, Node]) -> None:
    """A queue as deep as short prompts make it: it stays with the sender, and no piece fails."""
    source, destination = pair
    pieces = [Piece(index * 200, 200) for index in range(30_000)]
    sent = source.send(destination, 1, pieces)
    time.sleep(5 * SETTLE_S)
    assert sent.calls == []
    received = destination.receive(source, 1, pieces)
    assert received.wait() is None
    assert sent.wait() is None
    assert destination.taken([Piece(0, 6_000_000)]) == source.taken([Piece(0, 6_000_000)])
