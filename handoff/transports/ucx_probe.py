"""Two processes of this machine move blocks over UcxTransport, beside memcpy in one of them: lane, rates, CMA.

`python -m handoff.transports.ucx_probe source FD` and `... destination FD`, joined by a socket pair, whose ends are the
FDs. The destination prints a `Probe` as JSON. Rates are of the best round: other work on the machine only adds time.
"""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import msgspec
import numpy as np
import numpy.typing as npt

from handoff.transports.base import Piece, TransferError
from handoff.transports.child_answer import answer_of
from handoff.transports.ucx import UcxTransport

BLOCKS = {2 << 20: 64, 64 << 10: 256}
"""Length of a block in bytes: blocks in a round."""
POOL_BYTES = max(length * count for length, count in BLOCKS.items())
BUDGET_S = 0.4
"""For the rounds of one block length, ours and memcpy's together; at least LEAST_ROUNDS are run."""
LEAST_ROUNDS = 3
WAIT_S = 10.0
READ_BYTES = 1 << 16
SENT, EMPTY = 1, 2

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Rate:
    """Bytes per second for blocks of `block` bytes."""

    block: int
    ours: float
    memcpy: float


@dataclass(frozen=True, slots=True)
class Probe:
    """lane, warning: see Link. cma_error: why one process can't read the other's memory; empty if it can."""

    lane: str
    warning: str | None
    rates: tuple[Rate, ...]
    cma_error: str
    intact: bool


@dataclass(frozen=True, slots=True)
class _Hello:
    address: bytes
    pid: int
    pool: int


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _End:
    """One transport with waits. Raises TimeoutError when the other end doesn't answer."""

    def __init__(self, name: str, peer: str, pipe: Connection, value: int) -> None:
        self.pool: Bytes = np.full(POOL_BYTES, value, np.uint8)
        self.transport = UcxTransport()
        self._pipe, self._peer = pipe, peer
        self._done = threading.Event()
        self._error: TransferError | None = None
        self.transport.start(name, self.pool, lambda peer, frame: None)
        hello = _Hello(self.transport.address, os.getpid(), self.pool.ctypes.data)
        pipe.send_bytes(msgspec.msgpack.encode(hello))
        self.other = msgspec.msgpack.decode(self.receive(), type=_Hello)
        self.transport.connect(peer, self.other.address)

    def receive(self) -> bytes:
        if not self._pipe.poll(WAIT_S):
            raise TimeoutError(f"no word from the other process within {WAIT_S:.0f} s")
        return self._pipe.recv_bytes()

    def tell(self, block: int) -> None:
        self._pipe.send_bytes(str(block).encode())

    def move(self, block: int, ready: Callable[[], None]) -> None:
        pieces = [Piece(index * block, block) for index in range(BLOCKS[block])]
        self._done.clear()
        is_source = self._peer == "destination"
        post = self.transport.post_send if is_source else self.transport.post_receive
        post(self._peer, block, pieces, self._on_done)
        ready()
        if not self._done.wait(WAIT_S):
            raise TimeoutError(f"{BLOCKS[block]} blocks of {block} bytes did not arrive within {WAIT_S:.0f} s")
        if self._error is not None:
            raise self._error

    def _on_done(self, error: TransferError | None) -> None:
        self._error = error
        self._done.set()


def _source(pipe: Connection) -> None:
    end = _End("source", "destination", pipe, SENT)
    while block := int(end.receive()):
        end.move(block, lambda: None)
    end.transport.close()


def _destination(pipe: Connection) -> Probe:
    end = _End("destination", "source", pipe, EMPTY)
    scratch: Bytes = np.full(POOL_BYTES, EMPTY, np.uint8)
    rates = tuple(_rate(end, scratch, block) for block in BLOCKS)
    (link,) = end.transport.links()
    cma_error = _read_error(end.other.pid, end.other.pool)
    intact = bool((end.pool == SENT).all())
    end.tell(0)
    end.transport.close()
    return Probe(link.lane, link.warning, rates, cma_error, intact)


def _rate(end: _End, scratch: Bytes, block: int) -> Rate:
    """Rounds of ours and of memcpy take turns, so that both see the same machine."""
    ours: list[float] = []
    copies: list[float] = []
    started = time.perf_counter()
    while len(ours) < LEAST_ROUNDS or time.perf_counter() - started < BUDGET_S:
        ours.append(_timed(lambda: end.move(block, lambda: end.tell(block))))
        copies.append(_timed(lambda: _copy(end.pool, scratch, block)))
    moved = block * BLOCKS[block]
    return Rate(block, moved / min(ours), moved / min(copies))


def _copy(source: Bytes, target: Bytes, block: int) -> None:
    for offset in range(0, block * BLOCKS[block], block):
        target[offset : offset + block] = source[offset : offset + block]


def _timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _read_error(pid: int, address: int) -> str:
    """Read another process's memory as UCX's CMA lane does; the error's name, or empty."""
    target = np.full(READ_BYTES, EMPTY, np.uint8)
    here, there = _IoVec(target.ctypes.data, READ_BYTES), _IoVec(address, READ_BYTES)
    read = ctypes.CDLL(None, use_errno=True).process_vm_readv
    read.restype = ctypes.c_ssize_t
    read.argtypes = (ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong)
    if read(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) != READ_BYTES:
        return os.strerror(ctypes.get_errno())
    return "" if (target == SENT).all() else "other bytes were read than stand there"


def main() -> None:
    role, pipe = sys.argv[1], Connection(int(sys.argv[2]))
    with answer_of() as answer:
        if role == "source":
            _source(pipe)
        else:
            answer(msgspec.json.encode(_destination(pipe)))


if __name__ == "__main__":
    main()
