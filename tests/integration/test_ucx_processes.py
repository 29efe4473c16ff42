"""The UCX transport between processes: real lanes, real deaths, real sleep."""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("ucx_node.py")
ANSWER_TIMEOUT_S = 60.0
OUTCOME_TIMEOUT_S = 20.0
POOL_BYTES = 256 << 20
WHOLE = {"count": 256, "length": 1 << 20}


class RemoteNode:
    def __init__(self, name: str, seed: int, environ: dict[str, str]) -> None:
        self.name = name
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("UCX_")}
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), name, str(POOL_BYTES), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=inherited | {"PYTHONPATH": str(ROOT)} | environ,
        )

    def do(self, do: str, **arguments: Any) -> Any:
        self.tell(do, **arguments)
        return self.answer()

    def tell(self, do: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            assert selector.select(ANSWER_TIMEOUT_S), f"{self.name} does not answer"
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        self.process.kill()
        self.process.wait(ANSWER_TIMEOUT_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


Start = Callable[..., tuple[RemoteNode, RemoteNode]]


@pytest.fixture
def start_pair() -> Iterator[Start]:
    """Starts (source, destination) in processes of their own, joined, with these UCX settings of the user's."""
    nodes: list[RemoteNode] = []

    def start(environ: dict[str, str]) -> tuple[RemoteNode, RemoteNode]:
        source, destination = RemoteNode("source", 1, environ), RemoteNode("destination", 0, environ)
        nodes.extend((source, destination))
        addresses = {node.name: node.do("address") for node in nodes}
        source.do("connect", peer="destination", address=addresses["destination"])
        destination.do("connect", peer="source", address=addresses["source"])
        source.do("say", peer="destination", text="ready")
        destination.do("say", peer="source", text="ready")
        assert destination.do("heard", count=1, timeout_s=OUTCOME_TIMEOUT_S) == ["source: ready"]
        assert source.do("heard", count=1, timeout_s=OUTCOME_TIMEOUT_S) == ["destination: ready"]
        return source, destination

    yield start
    for node in nodes:
        node.end()


def move_whole_pool(source: RemoteNode, destination: RemoteNode) -> None:
    destination.do("post", way="receive", peer="source", channel=1, **WHOLE)
    source.do("post", way="send", peer="destination", channel=1, **WHOLE)
    assert destination.do("outcomes", count=1, timeout_s=OUTCOME_TIMEOUT_S)[-1] == "None"
    assert source.do("outcomes", count=1, timeout_s=OUTCOME_TIMEOUT_S)[-1] == "None"
    assert source.do("digest", length=POOL_BYTES) == destination.do("digest", length=POOL_BYTES)


@pytest.mark.parametrize("environ", [{}, {"UCX_TLS": "tcp"}], ids=["default", "tcp"])
def test_the_pool_arrives_and_the_lane_is_named(start_pair: Start, environ: dict[str, str]) -> None:
    source, destination = start_pair(environ)
    move_whole_pool(source, destination)
    for node, peer in ((source, "destination"), (destination, "source")):
        ((linked, lane, warning),) = node.do("links")
        assert linked == peer
        if environ:
            assert lane == "tcp"
            assert "UCX_TLS=tcp leaves shared memory out" in warning
        else:
            assert lane.startswith("shm")
            assert warning is None


def test_switched_off_shared_memory_is_told(start_pair: Start) -> None:
    off = ("UCX_POSIX_ERROR_HANDLING", "UCX_SYSV_ERROR_HANDLING", "UCX_CMA_MEMORY_INVALIDATE")
    source, _ = start_pair(dict.fromkeys(off, "n"))
    ((_, lane, warning),) = source.do("links")
    assert lane == "tcp"
    assert "UCX_POSIX_ERROR_HANDLING and UCX_SYSV_ERROR_HANDLING are off" in warning


@pytest.mark.parametrize("environ", [{}, {"UCX_TLS": "tcp"}], ids=["default", "tcp"])
@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP])
def test_a_source_that_dies_in_the_middle(start_pair: Start, environ: dict[str, str], death: signal.Signals) -> None:
    source, destination = start_pair(environ)
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


def test_a_destination_that_dies_in_the_middle(start_pair: Start) -> None:
    source, destination = start_pair({})
    destination.do("post", way="receive", peer="source", channel=0, count=3, length=1 << 20)
    source.do("post", way="send", peer="destination", channel=0, **WHOLE)
    source.do("post", way="send", peer="destination", channel=1, count=5000, length=1000)
    destination.process.kill()
    asked = time.monotonic()
    source.do("disconnect", peer="destination")
    assert source.do("outcomes", count=2, timeout_s=OUTCOME_TIMEOUT_S) == ["PeerLost", "PeerLost"]
    assert time.monotonic() - asked < 2


def test_a_reset_connection_is_noticed_without_operations(start_pair: Start) -> None:
    """TCP tells of a dead peer by itself, unlike shared memory."""
    source, destination = start_pair({"UCX_TLS": "tcp"})
    source.process.kill()
    deadline = time.monotonic() + OUTCOME_TIMEOUT_S
    while destination.do("links") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert destination.do("links") == []
    destination.do("post", way="receive", peer="source", channel=1, count=1, length=10)
    assert destination.do("outcomes", count=1, timeout_s=OUTCOME_TIMEOUT_S) == ["PeerLost"]


def test_an_idle_thread_sleeps(start_pair: Start) -> None:
    source, destination = start_pair({})
    move_whole_pool(source, destination)
    source.tell("cpu_share", seconds=2.0)
    assert destination.do("cpu_share", seconds=2.0) < 0.02
    assert source.answer() < 0.02


def test_a_thread_that_waits_for_a_slow_peer_sleeps(start_pair: Start) -> None:
    source, destination = start_pair({})
    destination.do("post", way="receive", peer="source", channel=1, **WHOLE)
    source.do("post", way="send", peer="destination", channel=2, **WHOLE)
    source.tell("cpu_share", seconds=2.0)
    assert destination.do("cpu_share", seconds=2.0) < 0.05
    assert source.answer() < 0.05


def test_nothing_stays_in_shared_memory(start_pair: Start) -> None:
    before = set(os.listdir("/dev/shm"))
    source, destination = start_pair({})
    move_whole_pool(source, destination)
    source.do("close")
    destination.process.kill()
    destination.process.wait(ANSWER_TIMEOUT_S)
    assert {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("ucx")} == set()
