"""How fast KV is re-laid out in host memory, beside copying the same bytes block by block.

    python -m benchmarks.relayout [--json]

One thread, a model of 30 layers x 3 KV heads x 64 dimensions in bf16, blocks of random order in pools larger than the
caches. GB/s are of the bytes that arrive on the wire. The ratio to memcpy is what to compare: absolute figures vary
between machines and days. In a transfer the copies of a window run beside the next window's bytes.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from handoff.relayout.copies import pack, unpack
from handoff.relayout.routes import Route, routes
from handoff.relayout.shape import KvShape
from handoff.relayout.windows import windows

ONE = KvShape(layers=30, kv_heads=3, head_dim=64, block_size=16, dtype="bf16")
STAGED = 32
"""Blocks of a window: 12 MB when all heads go."""
WINDOWS = 8
ROUNDS = 15


@dataclass(frozen=True)
class Case:
    """What is measured: a side of a route."""

    name: str
    side: str
    route: Route


def cases() -> list[Case]:
    def route(**change: Any) -> Route:
        return next(iter(routes(ONE, replace(ONE, **change)).values()))

    joined = routes(replace(ONE, ranks=3), ONE)[1, 0]
    return [
        Case("16 to 32 tokens", "unpack", route(block_size=32)),
        Case("32 to 16 tokens", "unpack", routes(replace(ONE, block_size=32), ONE)[0, 0]),
        Case("16 to 24 tokens", "unpack", route(block_size=24)),
        Case("1 rank to 3", "pack", route(ranks=3)),
        Case("1 rank to 3", "unpack", route(ranks=3)),
        Case("3 ranks to 1", "unpack", joined),
        Case("bf16 to fp32", "unpack", route(dtype="fp32")),
    ]


class Bench:
    """One case: a sequence of WINDOWS windows, its blocks in random order on both sides."""

    def __init__(self, case: Case) -> None:
        route = case.route
        tokens = range(STAGED * WINDOWS * route.source.block_size)
        self.route, self.side = route, case.side
        self.windows = windows(route.source.block_size, route.destination.block_size, tokens, STAGED)
        local = route.source if case.side == "pack" else route.destination
        count = -(-tokens.stop // local.block_size)
        self.blocks: list[int] = np.random.default_rng(1).permutation(count).tolist()
        self.pool = np.ones(count * local.block_bytes, np.uint8)
        self.staging = np.ones(STAGED * route.staged_block_bytes, np.uint8)
        self.plain = np.ones(WINDOWS * self.staging.size, np.uint8).reshape(WINDOWS * STAGED, -1)
        self.places: list[int] = np.random.default_rng(2).permutation(WINDOWS * STAGED).tolist()

    def relayout(self) -> None:
        for window in self.windows:
            if self.side == "pack":
                own = self.blocks[window.blocks.start : window.blocks.stop]
                pack(self.pool, self.route, own, self.staging)
            else:
                unpack(self.staging, self.route, window, self.blocks, self.pool)

    def memcpy(self) -> None:
        """The same bytes between the same area and blocks of random order, in the same direction."""
        staged = self.staging.reshape(STAGED, -1)
        for number, place in enumerate(self.places):
            if self.side == "pack":
                staged[number % STAGED] = self.plain[place]
            else:
                self.plain[place] = staged[number % STAGED]

    def rates(self) -> tuple[float, float]:
        """GB/s of the re-layout and of memcpy, in turns, so that both see the same machine. The first turn warms up."""
        seconds = [(timed(self.relayout), timed(self.memcpy)) for _ in range(ROUNDS + 1)][1:]
        total = self.plain.size / 1e9
        return total / median(own for own, _ in seconds), total / median(plain for _, plain in seconds)


def timed(work: Callable[[], None]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description="Bandwidth of re-laying out KV, beside memcpy.")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    options = parser.parse_args()
    table = Table("case", "copy", "GB/s", "memcpy, GB/s", "of memcpy")
    found: dict[str, dict[str, float]] = {}
    for case in cases():
        own, plain = Bench(case).rates()
        table.add_row(case.name, case.side, f"{own:.2f}", f"{plain:.2f}", f"{own / plain:.0%}")
        found[f"{case.side}, {case.name}"] = {"gb_s": own, "memcpy_gb_s": plain}
    Console().print(table)
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
