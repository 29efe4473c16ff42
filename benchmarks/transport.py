"""How fast the UCX transport moves blocks between two processes, beside raw ucxx and memcpy.

    python benchmarks/transport.py [--busy]

Prints GB/s per block size, scattered and contiguous (neighbours coalesce), how long one small operation takes beside
a long one, the latency of messages, and the CPU share of an idle transport thread. The rounds of the three alternate.
Absolute figures vary between machines and days; the ratios are what to compare. Ours moves pools of the memory that a
node would have here; memcpy and raw ucxx have private memory with huge pages. With --busy a Python loop runs in both
processes, as a scheduler does. The environment chooses other lanes: PRELAY_POOL_MEMORY=private|shared for the pools,
PRELAY_SHARED_POOLS=n for UCX's TCP.
"""

import argparse
import multiprocessing as mp
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from device.host_memory import pool_memory
from handoff.pieces import Runs, coalesce
from handoff.transports.base import Piece, TransferError
from handoff.transports.ucx import UcxTransport
from handoff.transports.ucx_env import prepare_ucx

BLOCKS = (2 << 20, 360 << 10, 64 << 10, 16 << 10)
BYTES_PER_ROUND = 192 << 20
SMALL_BLOCK = 360 << 10
ROUNDS = 9
PINGS = 200
IDLE_S = 3.0
TIMEOUT_S = 60.0
LARGE, SMALL = 1, 2
Bytes: TypeAlias = npt.NDArray[np.uint8]
Shape: TypeAlias = tuple[int, str]
"""(block bytes, "scattered" or "contiguous")"""
Pieces: TypeAlias = Sequence[Piece]

SHAPES: tuple[Shape, ...] = tuple((block, layout) for block in BLOCKS for layout in ("scattered", "contiguous"))


@cache
def pieces_of(shape: Shape) -> tuple[Pieces, Pieces]:
    """What the two sides post."""
    block, layout = shape
    count = BYTES_PER_ROUND // block
    if layout == "contiguous":
        return _both(coalesce(range(count), range(count), block))
    rng = np.random.default_rng(1)
    return _both(coalesce(rng.permutation(count).tolist(), rng.permutation(count).tolist(), block))


def _both(runs: Runs) -> tuple[Pieces, Pieces]:
    return runs.sends, runs.receives


def fresh_pool(value: int) -> Bytes:
    return np.full(BYTES_PER_ROUND, value, np.uint8)


def rate(shape: Shape, seconds: list[float]) -> float:
    return BYTES_PER_ROUND // shape[0] * shape[0] / median(seconds) / 1e9


def timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Memcpy:
    """One thread of one process."""

    def __init__(self) -> None:
        self._source, self._target = fresh_pool(1), fresh_pool(2)

    def move(self, shape: Shape) -> None:
        for source, target in zip(*pieces_of(shape), strict=True):
            piece = self._source[source.offset : source.offset + source.length]
            self._target[target.offset : target.offset + target.length] = piece


class Endpoint:
    """Our transport in one process, with waits."""

    def __init__(self, name: str, peer: str, pipe: Connection, value: int) -> None:
        self.peer = peer
        self.transport = UcxTransport()
        self.arrived: list[int] = []
        self._event = threading.Event()
        self._echo = False
        pool: Bytes = np.frombuffer(pool_memory(BYTES_PER_ROUND), np.uint8)
        pool[:] = value
        self.transport.start(name, pool, self._on_message)
        pipe.send(self.transport.address)
        self.transport.connect(peer, pipe.recv())

    def echo(self) -> None:
        """From now on, answer each message from the transport's thread."""
        self._echo = True

    def move(self, way: str, pieces: Pieces, ready: Callable[[], None]) -> None:
        self._event.clear()
        self._post(way, LARGE, pieces, self._done)
        ready()
        self._wait()

    def move_two(self, way: str, ready: Callable[[], None]) -> tuple[float, float]:
        """A long operation, and a small one posted behind it; the seconds until each has ended, on this side."""
        start = time.perf_counter()
        seconds: dict[int, float] = {}

        def ended(channel: int, error: TransferError | None) -> None:
            seconds[channel] = time.perf_counter() - start
            if len(seconds) == 2:
                self._done(error)

        self._event.clear()
        self._post(way, LARGE, [Piece(0, BYTES_PER_ROUND)], lambda error: ended(LARGE, error))
        self._post(way, SMALL, [Piece(0, SMALL_BLOCK)], lambda error: ended(SMALL, error))
        ready()
        self._wait()
        return seconds[LARGE], seconds[SMALL]

    def ping(self) -> float:
        self._event.clear()
        start = time.perf_counter()
        self.transport.send_message(self.peer, b"ping")
        self._wait()
        return time.perf_counter() - start

    def _post(self, way: str, channel: int, pieces: Pieces, done: Callable[[TransferError | None], None]) -> None:
        post = self.transport.post_send if way == "send" else self.transport.post_receive
        post(self.peer, channel, pieces, done)

    def _wait(self) -> None:
        if not self._event.wait(TIMEOUT_S):
            raise TimeoutError("the other process does not answer")

    def _done(self, error: TransferError | None) -> None:
        if error is not None:
            raise error
        self._event.set()

    def _on_message(self, peer: str, frame: bytes) -> None:
        if self._echo:
            self.transport.send_message(peer, frame)
        self._event.set()


def pause_and_ping(end: Endpoint) -> float:
    time.sleep(0.005)
    return end.ping()


def idle_share() -> float:
    (thread,) = [t for t in threading.enumerate() if t.name.startswith("ucx-")]
    clock = time.pthread_getcpuclockid(thread.ident or 0)
    before = time.clock_gettime(clock)
    time.sleep(IDLE_S)
    return (time.clock_gettime(clock) - before) / IDLE_S


RAW_SETTINGS = {
    "UCX_TLS": "all",
    "UCX_POSIX_ERROR_HANDLING": "y",
    "UCX_SYSV_ERROR_HANDLING": "y",
    "UCX_CMA_MEMORY_INVALIDATE": "y",
}
"""Raw UCX at its fastest: shared memory and CMA with error handling on, which nodes do without (see ucx_env)."""


class Raw:
    """ucxx as it is: every block posted at once, then progress until all are done."""

    def __init__(self, pipe: Connection, pool: Bytes) -> None:
        # UCX reads these when the context is made, so ours, which is there by now, is not changed.
        os.environ.update(RAW_SETTINGS)
        prepare_ucx()
        import ucxx._lib.libucxx as ucx
        from ucxx._lib.arr import Array

        self._ucx, self._array, self._pool = ucx, Array, pool
        self._worker = ucx.UCXWorker(ucx.UCXContext())
        pipe.send(self._worker.address.tobytes())
        remote = ucx.UCXAddress.create_from_buffer(pipe.recv())
        self._endpoint = ucx.UCXEndpoint.create_from_worker_address(self._worker, remote, True)

    def move(self, way: str, pieces: Pieces, ready: Callable[[], None]) -> None:
        post = self._endpoint.tag_send if way == "send" else self._endpoint.tag_recv
        requests: list[Any] = []
        for index, piece in enumerate(pieces):
            buffer = self._array(self._pool[piece.offset : piece.offset + piece.length])
            requests.append(post(buffer, self._ucx.UCXXTag(index)))
        ready()
        while not all(request.completed for request in requests):
            self._worker.progress()


def start_python_loop() -> None:
    def spin() -> None:
        while True:
            sum(range(1000))

    threading.Thread(target=spin, daemon=True).start()


def run_source(busy: bool, pipe: Connection) -> None:
    """Sends what the destination asks for, a pair (who, what), until None comes."""
    ours, raw = Endpoint("source", "destination", pipe, 1), Raw(pipe, fresh_pool(1))
    ours.echo()
    if busy:
        start_python_loop()
    while (asked := pipe.recv()) is not None:
        who, shape = asked
        if who == "two":
            ours.move_two("send", lambda: None)
        else:
            (raw if who == "raw" else ours).move("send", pieces_of(shape)[0], lambda: None)
    ours.transport.close()


def run_destination(busy: bool, pipe: Connection) -> Any:
    ours, raw, memcpy = Endpoint("destination", "source", pipe, 2), Raw(pipe, fresh_pool(2)), Memcpy()
    if busy:
        start_python_loop()

    def from_source(who: str, end: Endpoint | Raw, shape: Shape) -> float:
        return timed(lambda: end.move("receive", pieces_of(shape)[1], lambda: pipe.send((who, shape))))

    def one_round(shape: Shape) -> tuple[float, ...]:
        ours_s, raw_s = from_source("ours", ours, shape), from_source("raw", raw, shape)
        return ours_s, raw_s, timed(lambda: memcpy.move(shape))

    rates: dict[Shape, tuple[float, ...]] = {}
    for shape in SHAPES:
        pieces_of(shape)
        rounds = [one_round(shape) for _ in range(ROUNDS)]
        rates[shape] = tuple(rate(shape, list(column)) for column in zip(*rounds, strict=True))
    others = figures(ours, pipe)
    pipe.send(None)
    ours.transport.close()
    return rates, others


def figures(ours: Endpoint, pipe: Connection) -> dict[str, str]:
    both = [ours.move_two("receive", lambda: pipe.send(("two", None))) for _ in range(ROUNDS)]
    large, small = (median(column) for column in zip(*both, strict=True))
    awake = median(ours.ping() for _ in range(PINGS))
    asleep = median(pause_and_ping(ours) for _ in range(PINGS))
    beside = f"{SMALL_BLOCK >> 10} KiB posted behind {BYTES_PER_ROUND >> 20} MiB"
    return {
        "lane": ours.transport.links()[0].lane,
        beside: f"{small * 1e3:.1f} ms, the long one {large * 1e3:.1f} ms",
        "message round trip, threads awake": f"{awake * 1e6:.0f} us",
        "message round trip, both threads asleep": f"{asleep * 1e6:.0f} us",
        "CPU share of an idle thread": f"{idle_share():.2%}",
    }


def _answer(destination: Callable[[Connection], Any], pipe: Connection, results: Any) -> None:
    results.put(destination(pipe))


def run_pair(source: Callable[[Connection], None], destination: Callable[[Connection], Any]) -> Any:
    """Run source and destination in processes of their own; the destination's result."""
    spawn = mp.get_context("spawn")
    left, right = spawn.Pipe()
    results = spawn.SimpleQueue()
    processes = [
        spawn.Process(target=source, args=(left,), daemon=True),
        spawn.Process(target=_answer, args=(destination, right, results), daemon=True),
    ]
    for process in processes:
        process.start()
    result = results.get()
    for process in processes:
        process.join(TIMEOUT_S)
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--busy", action="store_true", help="run a Python loop in both processes")
    busy = parser.parse_args().busy
    rates, others = run_pair(partial(run_source, busy), partial(run_destination, busy))
    print(f"GB/s, median of {ROUNDS} rounds of {BYTES_PER_ROUND >> 20} MiB: two processes, one host")
    print(f"{'block':>8} {'':>10} {'ours':>7} {'raw ucxx':>9} {'memcpy':>7} {'ours/raw':>9} {'ours/memcpy':>12}")
    for (block, layout), (ours, raw, copied) in rates.items():
        row = f"{block >> 10:>4} KiB {layout:>10} {ours:>7.2f} {raw:>9.2f} {copied:>7.2f}"
        print(f"{row} {ours / raw:>9.2f} {ours / copied:>12.2f}")
    for name, figure in others.items():
        print(f"{name}: {figure}")


if __name__ == "__main__":
    main()
