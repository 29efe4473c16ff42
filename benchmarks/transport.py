"""How fast the UCX transport moves blocks between two processes, beside raw ucxx and memcpy.

    python benchmarks/transport.py

Prints GB/s per block size, the latency of messages, and the CPU share of an idle transport thread. Absolute figures
vary between machines and days; the ratios are what to compare.
"""

import multiprocessing as mp
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from handoff.transports.base import Piece, TransferError
from handoff.transports.ucx import UcxTransport
from handoff.transports.ucx_env import prepare_ucx

BLOCKS = (2 << 20, 360 << 10, 64 << 10, 16 << 10)
BYTES_PER_ROUND = 192 << 20
ROUNDS = 9
PINGS = 200
IDLE_S = 3.0
TIMEOUT_S = 60.0
Bytes = npt.NDArray[np.uint8]


def fresh_pool(value: int) -> Bytes:
    return np.full(BYTES_PER_ROUND, value, np.uint8)


def rate(block: int, seconds: list[float]) -> float:
    return BYTES_PER_ROUND // block * block / median(seconds) / 1e9


def timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def memcpy_rate(block: int) -> float:
    source, target = fresh_pool(1), fresh_pool(2)

    def copy() -> None:
        for offset in range(0, BYTES_PER_ROUND // block * block, block):
            target[offset : offset + block] = source[offset : offset + block]

    return rate(block, [timed(copy) for _ in range(ROUNDS)])


class Endpoint:
    """Our transport in one process, with waits."""

    def __init__(self, name: str, peer: str, pipe: Connection, value: int) -> None:
        self.peer = peer
        self.transport = UcxTransport()
        self.arrived: list[int] = []
        self._event = threading.Event()
        self._echo = False
        self.transport.start(name, fresh_pool(value), self._on_message)
        pipe.send(self.transport.address)
        self.transport.connect(peer, pipe.recv())

    def echo(self) -> None:
        """From now on, answer each message from the transport's thread."""
        self._echo = True

    def move(self, way: str, channel: int, block: int, ready: Callable[[], None]) -> None:
        pieces = [Piece(i * block, block) for i in range(BYTES_PER_ROUND // block)]
        self._event.clear()
        post = self.transport.post_send if way == "send" else self.transport.post_receive
        post(self.peer, channel, pieces, self._done)
        ready()
        self._wait()

    def ping(self) -> float:
        self._event.clear()
        start = time.perf_counter()
        self.transport.send_message(self.peer, b"ping")
        self._wait()
        return time.perf_counter() - start

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


def our_source(pipe: Connection) -> None:
    end = Endpoint("source", "destination", pipe, 1)
    end.echo()
    while (block := pipe.recv()) is not None:
        end.move("send", block, block, lambda: None)
    end.transport.close()


def our_figures(pipe: Connection) -> tuple[dict[int, float], dict[str, str]]:
    end = Endpoint("destination", "source", pipe, 2)
    rates = {block: rate(block, [our_round(end, pipe, block) for _ in range(ROUNDS)]) for block in BLOCKS}
    awake = median(end.ping() for _ in range(PINGS))
    asleep = median(pause_and_ping(end) for _ in range(PINGS))
    figures = {
        "lane": end.transport.links()[0].lane,
        "message round trip, threads awake": f"{awake * 1e6:.0f} us",
        "message round trip, both threads asleep": f"{asleep * 1e6:.0f} us",
        "CPU share of an idle thread": f"{idle_share():.2%}",
    }
    pipe.send(None)
    end.transport.close()
    return rates, figures


def our_round(end: Endpoint, pipe: Connection, block: int) -> float:
    return timed(lambda: end.move("receive", block, block, lambda: pipe.send(block)))


def pause_and_ping(end: Endpoint) -> float:
    time.sleep(0.005)
    return end.ping()


def idle_share() -> float:
    (thread,) = [t for t in threading.enumerate() if t.name.startswith("ucx-")]
    clock = time.pthread_getcpuclockid(thread.ident or 0)
    before = time.clock_gettime(clock)
    time.sleep(IDLE_S)
    return (time.clock_gettime(clock) - before) / IDLE_S


class Raw:
    """ucxx as it is, with our settings: every block posted at once, then progress until all are done."""

    def __init__(self, pipe: Connection, value: int) -> None:
        prepare_ucx()
        import ucxx._lib.libucxx as ucx
        from ucxx._lib.arr import Array

        self._ucx, self._array, self._pool = ucx, Array, fresh_pool(value)
        self._worker = ucx.UCXWorker(ucx.UCXContext())
        pipe.send(self._worker.address.tobytes())
        remote = ucx.UCXAddress.create_from_buffer(pipe.recv())
        self._endpoint = ucx.UCXEndpoint.create_from_worker_address(self._worker, remote, True)

    def move(self, way: str, block: int, ready: Callable[[], None]) -> None:
        post = self._endpoint.tag_send if way == "send" else self._endpoint.tag_recv
        requests: list[Any] = []
        for index in range(BYTES_PER_ROUND // block):
            buffer = self._array(self._pool[index * block : (index + 1) * block])
            requests.append(post(buffer, self._ucx.UCXXTag(index)))
        ready()
        while not all(request.completed for request in requests):
            self._worker.progress()


def raw_source(pipe: Connection) -> None:
    raw = Raw(pipe, 1)
    while (block := pipe.recv()) is not None:
        raw.move("send", block, lambda: None)


def raw_rates(pipe: Connection) -> dict[int, float]:
    raw = Raw(pipe, 2)
    rates = {block: rate(block, [raw_round(raw, pipe, block) for _ in range(ROUNDS)]) for block in BLOCKS}
    pipe.send(None)
    return rates


def raw_round(raw: Raw, pipe: Connection, block: int) -> float:
    return timed(lambda: raw.move("receive", block, lambda: pipe.send(block)))


def run_pair(source: Callable[[Connection], None], destination: Callable[[Connection], Any]) -> Any:
    """Run `source` and `destination` in processes of their own; the destination's result."""
    spawn = mp.get_context("spawn")
    left, right = spawn.Pipe()
    results = spawn.SimpleQueue()
    processes = [
        spawn.Process(target=source, args=(left,), daemon=True),
        spawn.Process(target=report, args=(destination, right, results), daemon=True),
    ]
    for process in processes:
        process.start()
    result = results.get()
    for process in processes:
        process.join(TIMEOUT_S)
    return result


def report(work: Callable[[Connection], Any], pipe: Connection, results: Any) -> None:
    results.put(work(pipe))


def main() -> None:
    ours, figures = run_pair(our_source, our_figures)
    raw = run_pair(raw_source, raw_rates)
    print("GB/s, median of rounds of 192 MiB: two processes, one host")
    print(f"{'block':>10} {'ours':>7} {'raw ucxx':>9} {'memcpy':>7} {'ours/raw':>9} {'ours/memcpy':>12}")
    for block in BLOCKS:
        copied = memcpy_rate(block)
        row = f"{block >> 10:>6} KiB {ours[block]:>7.2f} {raw[block]:>9.2f} {copied:>7.2f}"
        print(f"{row} {ours[block] / raw[block]:>9.2f} {ours[block] / copied:>12.2f}")
    for name, figure in figures.items():
        print(f"{name}: {figure}")


if __name__ == "__main__":
    main()
