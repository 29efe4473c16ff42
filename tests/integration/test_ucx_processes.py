"""The UCX transport between processes: real lanes, real deaths, real sleep."""

import os
import signal
import time

import pytest
from remote_nodes import ANSWER_TIMEOUT_S, BY_TCP, LANES, OUTCOME_TIMEOUT_S, WHOLE, StartPair, move_whole_pool


@pytest.mark.parametrize("expected", LANES)
def test_the_pool_arrives_and_the_lane_is_named(start_pair: StartPair, expected: str) -> None:
    source, destination = start_pair(LANES[expected])
    move_whole_pool(source, destination)
    for node, peer in ((source, "destination"), (destination, "source")):
        ((linked, lane, warning),) = node.do("links")
        assert linked == peer
        assert lane == expected
        if lane == "tcp":
            assert "PRELAY_SHARED_POOLS=n forbids" in warning
        else:
            assert warning is None


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP])
def test_a_source_that_dies_in_the_middle(start_pair: StartPair, death: signal.Signals) -> None:
    source, destination = start_pair(BY_TCP)
    for channel in range(4):
        destination.do("post", way="receive", peer="source", channel=channel, **WHOLE)
    source.do("post", way="send", peer="destination", channel=0, count=100, length=1 << 20)
    source.do("post", way="send", peer="destination", channel=1, count=2000, length=100_000)
    source.process.send_signal(death)
    asked = time.monotonic()
    destination.do("disconnect", peer="source")
    outcomes = destination.do("outcomes", count=4, timeout_s=OUTCOME_TIMEOUT_S)
    assert time.monotonic() - asked < 2
    assert len(outcomes) == 4
    assert outcomes.count("PeerLost") >= 3
    written = destination.do("written")
    source.process.send_signal(signal.SIGCONT)
    time.sleep(0.3)
    assert destination.do("written") == written
    assert len(destination.do("outcomes", count=4, timeout_s=0)) == 4
    assert destination.do("links") == []


def test_a_destination_that_dies_in_the_middle(start_pair: StartPair) -> None:
    source, destination = start_pair(BY_TCP)
    destination.do("post", way="receive", peer="source", channel=0, count=3, length=1 << 20)
    source.do("post", way="send", peer="destination", channel=0, **WHOLE)
    source.do("post", way="send", peer="destination", channel=1, count=5000, length=1000)
    destination.process.kill()
    asked = time.monotonic()
    source.do("disconnect", peer="destination")
    assert source.do("outcomes", count=2, timeout_s=OUTCOME_TIMEOUT_S) == ["PeerLost", "PeerLost"]
    assert time.monotonic() - asked < 2


def test_a_reset_connection_is_noticed_without_operations(start_pair: StartPair) -> None:
    """The kernel tells of a dead peer by itself."""
    source, destination = start_pair({})
    source.process.kill()
    deadline = time.monotonic() + OUTCOME_TIMEOUT_S
    while destination.do("links") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert destination.do("links") == []
    destination.do("post", way="receive", peer="source", channel=1, count=1, length=10)
    assert destination.do("outcomes", count=1, timeout_s=OUTCOME_TIMEOUT_S) == ["PeerLost"]


def test_an_idle_thread_sleeps(start_pair: StartPair) -> None:
    source, destination = start_pair({})
    move_whole_pool(source, destination)
    source.tell("cpu_share", seconds=2.0)
    assert destination.do("cpu_share", seconds=2.0) < 0.02
    assert source.answer() < 0.02


def test_a_thread_that_waits_for_a_slow_peer_sleeps(start_pair: StartPair) -> None:
    source, destination = start_pair({})
    destination.do("post", way="receive", peer="source", channel=1, **WHOLE)
    source.do("post", way="send", peer="destination", channel=2, **WHOLE)
    source.tell("cpu_share", seconds=2.0)
    assert destination.do("cpu_share", seconds=2.0) < 0.05
    assert source.answer() < 0.05


def test_nothing_stays_in_shared_memory(start_pair: StartPair) -> None:
    before = set(os.listdir("/dev/shm"))
    source, destination = start_pair({})
    move_whole_pool(source, destination)
    source.do("close")
    destination.process.kill()
    destination.process.wait(ANSWER_TIMEOUT_S)
    assert {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("ucx")} == set()
