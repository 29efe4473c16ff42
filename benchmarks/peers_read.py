"""What NIXL and the Mooncake Transfer Engine need for the same blocks: run by `benchmarks.handoff`.

    PEERS_PYTHON benchmarks/peers_read.py nixl|mooncake '[[blocks, block_bytes, layout, rounds], ...]'

Runs in a Python of its own that has them (pip: nixl-cu12, mooncake-transfer-engine-non-cuda, numpy), so it imports
nothing of Prelay. Prints {"rows": [[seconds, ...], ...]}, one row a case; {"missing": why} where the peer isn't there.
"""

import json
import multiprocessing as mp
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

TIMEOUT_S = 60.0
WARMUPS = 1
MOONCAKE_BATCH = 512
"""Blocks of one call; it refuses some thousands."""


def offsets(blocks: int, block_bytes: int, layout: str, seed: int) -> list[int]:
    order = np.arange(blocks) if layout == "contiguous" else np.random.default_rng(seed).permutation(blocks)
    return [int(index) * block_bytes for index in order]


class Nixl:
    """READs with prepared descriptors over the UCX back end."""

    def __init__(self, name: str, pool: Any) -> None:
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        self._agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
        self._pool = pool
        self._remote = ""
        self._agent.register_memory([(pool.ctypes.data, pool.nbytes, 0, "")], "DRAM")

    def address(self) -> Any:
        return self._agent.get_agent_metadata()

    def reader(self, address: Any, base: int, into: list[int], out: list[int], block_bytes: int) -> Callable[[], None]:
        agent, count = self._agent, len(into)
        self._remote = self._remote or agent.add_remote_agent(address)
        mine = [(self._pool.ctypes.data + offset, block_bytes, 0) for offset in into]
        local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", mine, "DRAM")
        theirs = agent.prep_xfer_dlist(self._remote, [(base + offset, block_bytes, 0) for offset in out], "DRAM")
        indices = list(range(count))

        def read() -> None:
            handle = agent.make_prepped_xfer("READ", local, indices, theirs, indices, b"done")
            agent.transfer(handle)
            deadline = time.monotonic() + TIMEOUT_S
            while (state := agent.check_xfer_state(handle)) != "DONE":
                if state == "ERR" or time.monotonic() > deadline:
                    raise RuntimeError(f"NIXL ended with {state}")
            agent.release_xfer_handle(handle)

        return read


class Mooncake:
    """Batch READs over TCP, the only transport that it has between processes without RDMA."""

    def __init__(self, name: str, pool: Any) -> None:
        from mooncake.engine import TransferEngine

        self._engine, self._pool = TransferEngine(), pool
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError("Mooncake does not start")
        self._engine.register_memory(pool.ctypes.data, pool.nbytes)

    def address(self) -> Any:
        return f"127.0.0.1:{self._engine.get_rpc_port()}"

    def reader(self, address: Any, base: int, into: list[int], out: list[int], block_bytes: int) -> Callable[[], None]:
        mine = [self._pool.ctypes.data + offset for offset in into]
        theirs = [base + offset for offset in out]
        batches = [slice(start, start + MOONCAKE_BATCH) for start in range(0, len(into), MOONCAKE_BATCH)]

        def read() -> None:
            for batch in batches:
                lengths = [block_bytes] * len(mine[batch])
                if code := self._engine.batch_transfer_sync_read(address, mine[batch], theirs[batch], lengths):
                    raise RuntimeError(f"Mooncake ended with {code}")

        return read


PEERS: dict[str, Any] = {"nixl": Nixl, "mooncake": Mooncake}


def serve(peer: str, pool_bytes: int, pipe: Connection) -> None:
    pool = np.random.default_rng(1).integers(0, 256, pool_bytes, np.uint8)
    engine = PEERS[peer]("source", pool)
    pipe.send((engine.address(), pool.ctypes.data, int(pool.sum(dtype=np.uint64))))
    pipe.recv()


def read_all(peer: str, cases: list[tuple[int, int, str, int]], pipe: Connection) -> list[list[float]]:
    pool = np.ones(pool_bytes(cases), np.uint8)
    engine = PEERS[peer]("destination", pool)
    if not pipe.poll(TIMEOUT_S):
        raise TimeoutError("the source does not start")
    address, base, _ = pipe.recv()
    rows = []
    for blocks, block_bytes, layout, rounds in cases:
        into, out = offsets(blocks, block_bytes, layout, 1), offsets(blocks, block_bytes, layout, 2)
        read = engine.reader(address, base, into, out, block_bytes)
        seconds = []
        for _ in range(WARMUPS + rounds):
            start = time.perf_counter()
            read()
            seconds.append(time.perf_counter() - start)
        rows.append(seconds[WARMUPS:])
    return rows


def pool_bytes(cases: list[tuple[int, int, str, int]]) -> int:
    return max(blocks * block_bytes for blocks, block_bytes, _, _ in cases)


def main() -> None:
    peer, cases = sys.argv[1], json.loads(sys.argv[2])
    module = {"nixl": "nixl_cu12", "mooncake": "mooncake.engine"}[peer]
    try:
        __import__(module)
    except ImportError as error:
        print(json.dumps({"missing": str(error)}), flush=True)
        return
    spawn = mp.get_context("spawn")
    ours, theirs = spawn.Pipe()
    source = spawn.Process(target=serve, args=(peer, pool_bytes(cases), theirs), daemon=True)
    source.start()
    try:
        rows = read_all(peer, cases, ours)
        print(json.dumps({"rows": rows}), flush=True)
    finally:
        source.kill()
        source.join()
    os._exit(0)  # NIXL's own end can be a segmentation fault


if __name__ == "__main__":
    main()
