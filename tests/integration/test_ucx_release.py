"""What the UCX transport gives back: memory that UCX lets go of late, descriptors, threads."""

import os
import queue
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from handoff.transports import ucx_worker
from handoff.transports.base import PeerLost, Piece, TransferError
from handoff.transports.pieces import pool_bytes
from handoff.transports.shared_pool import SETTING
from handoff.transports.ucx import UcxTransport
from handoff.transports.ucx_pool import span_maker

TIMEOUT_S = 20.0
PIECES = [Piece(index << 16, 1 << 16) for index in range(256)]
Outcomes = queue.SimpleQueue[TransferError | None]


def started(name: str) -> UcxTransport:
    transport = UcxTransport()
    transport.start(name, np.zeros(16 << 20, np.uint8), lambda peer, frame: None)
    return transport


def join(left: UcxTransport, right: UcxTransport) -> None:
    left.connect("right", right.address)
    right.connect("left", left.address)
    deadline = time.monotonic() + TIMEOUT_S
    while not (left.links() and right.links()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def by_ucx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "n")


@pytest.fixture
def pair() -> Iterator[tuple[UcxTransport, UcxTransport]]:
    transports = started("left"), started("right")
    join(*transports)
    yield transports
    for transport in transports:
        transport.close()


@pytest.mark.parametrize("end", ["disconnect", "close"])
def test_memory_that_ucx_lets_go_of_late(
    pair: tuple[UcxTransport, UcxTransport], end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no time to wait for UCX, the callbacks come later, and once."""
    monkeypatch.setattr(ucx_worker, "CLOSE_QUIET_S", 0.0)
    left, right = pair
    outcomes: Outcomes = queue.SimpleQueue()
    for channel in range(8):
        right.post_receive("left", channel, PIECES, outcomes.put)
        left.post_send("right", channel, PIECES[:100], outcomes.put)
    if end == "disconnect":
        right.disconnect("left")
    else:
        right.close()
    left.disconnect("right")
    errors = [outcomes.get(timeout=TIMEOUT_S) for _ in range(16)]
    assert sum(isinstance(error, PeerLost) for error in errors) >= 8
    right.close()
    left.close()
    assert outcomes.empty()


def test_late_pieces_of_a_given_up_connection_are_dropped(
    pair: tuple[UcxTransport, UcxTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager pieces that nobody received leave UCX's memory; over a new connection the same channel works."""
    dropped: list[int] = []
    discard = ucx_worker.UcxWorker._discard

    def spy(self: ucx_worker.UcxWorker, probe: Any) -> None:
        dropped.append(probe.length)
        discard(self, probe)

    monkeypatch.setattr(ucx_worker.UcxWorker, "_discard", spy)
    left, right = pair
    outcomes: Outcomes = queue.SimpleQueue()
    small = [Piece(index * 1000, 1000) for index in range(200)]
    left.post_send("right", 1, small, outcomes.put)
    assert outcomes.get(timeout=TIMEOUT_S) is None
    right.disconnect("left")
    left.disconnect("right")
    join(left, right)
    deadline = time.monotonic() + TIMEOUT_S
    while dropped.count(1000) < 200 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert dropped.count(1000) == 200
    received: Outcomes = queue.SimpleQueue()
    right.post_receive("left", 1, small, received.put)
    time.sleep(0.3)
    assert received.empty()
    left.post_send("right", 1, small, outcomes.put)
    assert received.get(timeout=TIMEOUT_S) is None


def test_pieces_of_a_device_pool_are_addresses_in_it() -> None:
    """No GPU is needed to describe its memory."""

    class DevicePool:
        def __init__(self) -> None:
            self.__cuda_array_interface__ = {"shape": (100,), "typestr": "|u1", "data": (4096, False), "version": 3}

    pool = DevicePool()
    assert pool_bytes(pool) == 100
    span = span_maker(pool)(Piece(40, 9))
    assert span.cuda
    assert span.nbytes == 9
    assert span.obj.__cuda_array_interface__["data"] == (4136, False)


def test_closing_gives_back_descriptors() -> None:
    def open_and_close() -> None:
        left, right = started("left"), started("right")
        join(left, right)
        left.close()
        right.close()

    open_and_close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(4):
        open_and_close()
    assert len(os.listdir("/proc/self/fd")) <= before
