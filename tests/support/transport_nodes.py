"""Nodes of one process that are joined by a transport, for the contract suite."""

import threading
import time
from collections.abc import Callable, Sequence
from mmap import mmap

import numpy as np
import numpy.typing as npt

from device.host_memory import private_memory
from handoff.transports.base import Piece, TransferError, Transport

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
    def __init__(self, name: str, transport: Transport, memory: Callable[[int], mmap] = private_memory) -> None:
        self.name = name
        self.transport = transport
        self.pool: npt.NDArray[np.uint8] = np.frombuffer(memory(POOL_BYTES), np.uint8)
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


def wait_until(condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.005)
