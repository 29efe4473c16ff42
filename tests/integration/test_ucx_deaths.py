"""Peers that die, stop and come back in the middle of a transfer, with nobody to tell of it but the transport."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from remote_nodes import (
    LANES,
    OUTCOME_TIMEOUT_S,
    POOL_BYTES,
    WHOLE,
    RemoteNode,
    StartNode,
    StartPair,
    join,
    move_whole_pool,
)

from handoff.transports.base import Piece, TransferError
from handoff.transports.liveness import PEER_SILENCE_S
from handoff.transports.ucx import UcxTransport

SLACK_S = 1.5
SETTLE_S = 0.3
ON_ALL_LANES = pytest.mark.parametrize("environ", LANES.values(), ids=LANES)
DEATHS = pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP])


def post_all(source: RemoteNode, destination: RemoteNode) -> None:
    """One transfer that moves, one that waits for the destination, one that waits for the source."""
    for channel in (1, 2):
        destination.do("post", way="receive", peer="source", channel=channel, **WHOLE)
    for channel in (1, 3):
        source.do("post", way="send", peer="destination", channel=channel, **WHOLE)


def assert_serves(survivor: RemoteNode, other: RemoteNode) -> None:
    """A transfer each way, over a connection that stood before."""
    before = {node: len(node.do("outcomes", count=0, timeout_s=0)) for node in (survivor, other)}
    for channel, receiver, sender in ((1, survivor, other), (2, other, survivor)):
        receiver.do("post", way="receive", peer=sender.name, channel=channel, **WHOLE)
        sender.do("post", way="send", peer=receiver.name, channel=channel, **WHOLE)
    for node in (survivor, other):
        outcomes = node.do("outcomes", count=before[node] + 2, timeout_s=OUTCOME_TIMEOUT_S)
        assert outcomes[before[node] :] == ["None", "None"]


@ON_ALL_LANES
@DEATHS
@pytest.mark.parametrize("victim", ["source", "destination"])
def test_a_peer_that_dies_is_given_up_in_time(
    start_pair: StartPair, start_node: StartNode, environ: dict[str, str], death: signal.Signals, victim: str
) -> None:
    source, destination = start_pair(environ)
    dying, survivor = (source, destination) if victim == "source" else (destination, source)
    other = start_node("other", 2, environ)
    join(survivor, other)
    post_all(source, destination)
    dying.process.send_signal(death)
    asked = time.monotonic()
    outcomes = survivor.do("outcomes", count=2, timeout_s=OUTCOME_TIMEOUT_S)
    assert time.monotonic() - asked < PEER_SILENCE_S + SLACK_S
    assert len(outcomes) == 2
    assert "PeerLost" in outcomes
    written = survivor.do("digest", length=256 << 20)
    dying.process.send_signal(signal.SIGCONT)
    time.sleep(SETTLE_S)
    assert survivor.do("digest", length=256 << 20) == written
    assert [link[0] for link in survivor.do("links")] == ["other"]
    assert survivor.do("outcomes", count=3, timeout_s=0) == outcomes
    assert_serves(survivor, other)


@ON_ALL_LANES
def test_a_destination_that_slept_too_long_gets_no_success(start_pair: StartPair, environ: dict[str, str]) -> None:
    """Its source has given it up and uses the memory for something else, which must not pass for what was sent."""
    source, destination = start_pair(environ)
    move_whole_pool(source, destination)  # Every lane is set up, so what is announced waits at the destination.
    part = {"count": 4, "length": 1 << 20}
    destination.do("post", way="receive", peer="source", channel=2, **part)
    destination.process.send_signal(signal.SIGSTOP)
    source.do("post", way="send", peer="destination", channel=2, **part)
    assert source.do("outcomes", count=2, timeout_s=OUTCOME_TIMEOUT_S)[1] == "PeerLost"
    source.do("fill", value=0)
    destination.process.send_signal(signal.SIGCONT)
    assert destination.do("outcomes", count=2, timeout_s=OUTCOME_TIMEOUT_S)[1] == "PeerLost"


@pytest.mark.parametrize("moved_for_s", [0.004, 0.012])
@pytest.mark.parametrize("environ", [LANES["cma"], LANES["shm"]], ids=["cma", "shm"])
def test_a_destination_that_sleeps_in_the_middle_of_copying(
    start_pair: StartPair, environ: dict[str, str], moved_for_s: float
) -> None:
    """It copies on by itself when it wakes up, from memory that its source has reused by then."""
    source, destination = start_pair(environ)
    sent = source.do("digest", length=POOL_BYTES)
    destination.do("post", way="receive", peer="source", channel=1, **WHOLE)
    source.do("post", way="send", peer="destination", channel=1, **WHOLE)
    time.sleep(moved_for_s)
    destination.process.send_signal(signal.SIGSTOP)
    assert source.do("outcomes", count=1, timeout_s=OUTCOME_TIMEOUT_S)
    source.do("fill", value=0)
    destination.process.send_signal(signal.SIGCONT)
    outcome = destination.do("outcomes", count=1, timeout_s=OUTCOME_TIMEOUT_S)
    assert outcome == ["PeerLost"] or destination.do("digest", length=POOL_BYTES) == sent


@ON_ALL_LANES
@DEATHS
def test_a_source_that_comes_back_in_a_new_process(
    start_pair: StartPair, start_node: StartNode, environ: dict[str, str], death: signal.Signals
) -> None:
    """It is connected before the old one's silence has been noticed; nothing of the old one lands any more."""
    old, destination = start_pair(environ)
    post_all(old, destination)
    old.process.send_signal(death)
    new = start_node("source", 5, environ)
    join(new, destination)
    outcomes = destination.do("outcomes", count=2, timeout_s=OUTCOME_TIMEOUT_S)
    assert "PeerLost" in outcomes
    destination.do("post", way="receive", peer="source", channel=1, **WHOLE)
    new.do("post", way="send", peer="destination", channel=1, **WHOLE)
    assert destination.do("outcomes", count=3, timeout_s=OUTCOME_TIMEOUT_S)[2] == "None"
    old.process.send_signal(signal.SIGCONT)
    time.sleep(SETTLE_S)
    assert destination.do("digest", length=256 << 20) == new.do("digest", length=256 << 20)
    assert [link[0] for link in destination.do("links")] == ["source"]


def test_a_stopped_peer_that_is_back_in_time_is_kept(start_pair: StartPair) -> None:
    source, destination = start_pair({})
    destination.do("post", way="receive", peer="source", channel=1, **WHOLE)
    source.process.send_signal(signal.SIGSTOP)
    time.sleep(PEER_SILENCE_S / 2)
    source.process.send_signal(signal.SIGCONT)
    time.sleep(PEER_SILENCE_S)
    assert destination.do("outcomes", count=1, timeout_s=0) == []
    source.do("post", way="send", peer="destination", channel=1, **WHOLE)
    assert destination.do("outcomes", count=1, timeout_s=OUTCOME_TIMEOUT_S) == ["None"]


@contextmanager
def busy_interpreter(threads: int) -> Iterator[None]:
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(1000))

    spinning = [threading.Thread(target=spin) for _ in range(threads)]
    for thread in spinning:
        thread.start()
    yield
    stop.set()
    for thread in spinning:
        thread.join(OUTCOME_TIMEOUT_S)


def test_a_peer_whose_interpreter_is_busy_is_kept() -> None:
    """Both transports share an interpreter with six busy threads, and their bound is a third of the usual one."""
    transports = UcxTransport(PEER_SILENCE_S / 3), UcxTransport(PEER_SILENCE_S / 3)
    for name, transport in zip(("left", "right"), transports, strict=True):
        transport.start(name, np.ones(1 << 20, np.uint8), lambda peer, frame: None)
    left, right = transports
    left.connect("right", right.address)
    right.connect("left", left.address)
    ended = threading.Event()
    outcomes: list[TransferError | None] = []

    def done(error: TransferError | None) -> None:
        outcomes.append(error)
        ended.set()

    left.post_receive("right", 1, [Piece(0, 1 << 20)], done)
    with busy_interpreter(6):
        assert not ended.wait(PEER_SILENCE_S)
        right.post_send("left", 1, [Piece(0, 1 << 20)], lambda error: None)
        assert ended.wait(OUTCOME_TIMEOUT_S)
    assert outcomes == [None]
    left.close()
    right.close()


def test_a_stopped_peer_of_which_nothing_is_expected_is_kept(start_pair: StartPair) -> None:
    """An idle peer is not asked and not given up: its silence counts from the operation on."""
    source, destination = start_pair({})
    source.process.send_signal(signal.SIGSTOP)
    time.sleep(PEER_SILENCE_S + SLACK_S)
    source.process.send_signal(signal.SIGCONT)
    move_whole_pool(source, destination)
