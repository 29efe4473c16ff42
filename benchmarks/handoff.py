"""What a handoff costs beside what others need to move the same blocks, between two processes of one machine.

    python -m benchmarks.handoff [--peers-python PATH] [--rounds 3] [--json]

    memcpy     one thread of one process, block by block
    raw ucx    UCXX as it is: each block one message, all posted at once, two threads that poll
    prelay     from the first token to a runnable destination: real nodes, all of a handoff, sampled checksums
    nixl       READ with prepared descriptors, UCX back end
    mooncake   batch read, TCP

The paths take turns, each in fresh processes, `rounds` times; medians over all. NIXL and Mooncake are not part of
Prelay: give the Python of a virtual environment that has them with --peers-python or PRELAY_PEERS_PYTHON (pip:
nixl-cu12, mooncake-transfer-engine-non-cuda, numpy); what isn't there is left out.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.peers_read import offsets
from benchmarks.transport import Raw, run_pair
from cluster.handoff_bench.figures import Figures
from cluster.handoff_bench.run import measure
from cluster.handoff_bench.spec import Layout, Spec
from handoff.logs import quiet_logs
from handoff.transports.base import Piece

HANDOFF_BYTES = 128 << 20
SIZES = (16 << 10, 64 << 10, 360 << 10, 2 << 20)
LAYOUTS: tuple[Layout, ...] = ("contiguous", "scattered")
MANY = 10_000
REPEATS = 5
"""Of one case, each time that it is a path's turn."""
TIMEOUT_S = 300.0
PEERS_SCRIPT = Path(__file__).with_name("peers_read.py")


class Case(NamedTuple):
    blocks: int
    block_bytes: int
    layout: Layout

    @property
    def bytes(self) -> int:
        return self.blocks * self.block_bytes


CASES = [Case(HANDOFF_BYTES // size, size, layout) for size in SIZES for layout in LAYOUTS]
CASES.append(Case(MANY, 16 << 10, "scattered"))
POOL_BYTES = max(case.bytes for case in CASES)
Rows = list[list[float]]
"""By case, seconds of each repeat."""


class Missing(RuntimeError):
    """A path that is not on this machine."""


def memcpy() -> Rows:
    source, target = np.full(POOL_BYTES, 1, np.uint8), np.full(POOL_BYTES, 2, np.uint8)

    def copy(case: Case) -> float:
        into, out = (offsets(*case, seed) for seed in (1, 2))
        start = time.perf_counter()
        for to, at in zip(into, out, strict=True):
            target[to : to + case.block_bytes] = source[at : at + case.block_bytes]
        return time.perf_counter() - start

    return [[copy(case) for _ in range(1 + REPEATS)][1:] for case in CASES]


def raw_ucx() -> Rows:
    rows: Rows = run_pair(_raw_source, _raw_destination)
    return rows


def _pieces(case: Case, seed: int) -> list[Piece]:
    return [Piece(offset, case.block_bytes) for offset in offsets(*case, seed)]


def _raw_source(pipe: Connection) -> None:
    raw = Raw(pipe, np.full(POOL_BYTES, 1, np.uint8))
    while (case := pipe.recv()) is not None:
        raw.move("send", _pieces(Case(*case), 2), lambda: None)


def _raw_destination(pipe: Connection) -> Rows:
    raw = Raw(pipe, np.full(POOL_BYTES, 2, np.uint8))

    def receive(case: Case) -> float:
        into = _pieces(case, 1)
        start = time.perf_counter()
        raw.move("receive", into, lambda: pipe.send(tuple(case)))
        return time.perf_counter() - start

    rows = [[receive(case) for _ in range(1 + REPEATS)][1:] for case in CASES]
    pipe.send(None)
    return rows


class Prelay:
    """Also keeps what is shown beside the times."""

    def __init__(self) -> None:
        self.lane = ""
        self.moving: Rows = [[] for _ in CASES]

    def __call__(self) -> Rows:
        return [self._measure(number, case) for number, case in enumerate(CASES)]

    def _measure(self, number: int, case: Case) -> list[float]:
        blocks, block_bytes, layout = case
        found: Figures = asyncio.run(measure(Spec(blocks, block_bytes, REPEATS, layout, checked=1)))
        if not found.is_sound:
            raise RuntimeError(f"handoffs failed: {found}")
        self.lane = found.lane
        self.moving[number].append(case.bytes / found.moving_gb_per_s / 1e9)
        return [found.handed_p50_ms / 1e3]


def peer(name: str, python: str | None) -> Callable[[], Rows]:
    def read() -> Rows:
        if python is None:
            raise Missing("no --peers-python")
        cases = json.dumps([[*case, REPEATS] for case in CASES])
        command = [python, str(PEERS_SCRIPT), name, cases]
        environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environ)
        lines = [line for line in done.stdout.splitlines() if line.startswith(('{"rows"', '{"missing"'))]
        if done.returncode or not lines:
            raise Missing(f"it ended with {done.returncode}: {done.stderr.strip()[-300:]}")
        answer = json.loads(lines[-1])
        if "missing" in answer:
            raise Missing(answer["missing"])
        rows: Rows = answer["rows"]
        return rows

    return read


def take_turns(paths: dict[str, Callable[[], Rows]], rounds: int) -> tuple[dict[str, Rows], dict[str, str]]:
    """(seconds by path and case, why a path is missing)."""
    seconds: dict[str, Rows] = {name: [[] for _ in CASES] for name in paths}
    missing: dict[str, str] = {}
    for _ in range(rounds):
        for name, path in paths.items():
            if name in missing:
                continue
            try:
                for kept, new in zip(seconds[name], path(), strict=True):
                    kept += new
            except (Missing, subprocess.TimeoutExpired) as error:
                missing[name] = str(error)
    return {name: rows for name, rows in seconds.items() if name not in missing}, missing


def result(seconds: dict[str, Rows]) -> dict[str, Any]:
    """rows: GB/s, of all paths and cases. ratios: of Prelay's to that of each other path, by case."""
    rates = {
        name: [case.bytes / median(row) / 1e9 for case, row in zip(CASES, rows, strict=True)]
        for name, rows in seconds.items()
    }
    rows = [
        {
            "path": name,
            "blocks": case.blocks,
            "block_bytes": case.block_bytes,
            "layout": case.layout,
            "gb_per_s": round(rate, 3),
        }
        for name, by_case in rates.items()
        for case, rate in zip(CASES, by_case, strict=True)
    ]
    ratios = {
        name: {
            label(case): round(ours / rate, 3) for case, ours, rate in zip(CASES, rates["prelay"], by_case, strict=True)
        }
        for name, by_case in rates.items()
        if name != "prelay"
    }
    return {"rows": rows, "ratios": ratios}


def label(case: Case) -> str:
    return f"{case.blocks} x {case.block_bytes >> 10} KiB {case.layout}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Handoffs beside memcpy, raw UCX, NIXL and Mooncake.")
    parser.add_argument("--peers-python", default=os.environ.get("PRELAY_PEERS_PYTHON"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    options = parser.parse_args()
    quiet_logs()
    ours = Prelay()
    paths: dict[str, Callable[[], Rows]] = {
        "memcpy": memcpy,
        "raw ucx": raw_ucx,
        "prelay": ours,
        "nixl": peer("nixl", options.peers_python),
        "mooncake": peer("mooncake", options.peers_python),
    }
    seconds, missing = take_turns(paths, options.rounds)
    found = result({**seconds, "prelay, moving": ours.moving})
    by_path = {
        name: [row["gb_per_s"] for row in found["rows"] if row["path"] == name]
        for name in dict.fromkeys(row["path"] for row in found["rows"])
    }
    table = Table("GB/s", *by_path)
    for number, case in enumerate(CASES):
        table.add_row(label(case), *(f"{rates[number]:.2f}" for rates in by_path.values()))
    Console(width=120).print(table)
    print(f"prelay's lane: {ours.lane}")
    for name, why in missing.items():
        print(f"left out: {name}: {why}")
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
