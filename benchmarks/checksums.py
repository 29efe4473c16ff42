"""What the checksums of a handoff cost: the same handoffs without, with sampled and with full ones, in turns.

    python -m benchmarks.checksums [--rounds 40] [--json]

All pairs of nodes live side by side and take turns, handoff by handoff, so that all see the same machine. The time is
from the first token to a runnable destination: both sides' checksums are in it.
"""

import argparse
import asyncio
import json
from contextlib import AsyncExitStack
from typing import get_args

from rich.console import Console
from rich.table import Table

from cluster.handoff_bench.run import opened
from cluster.handoff_bench.spec import Spec
from handoff.checksum import Checksums
from handoff.logs import quiet_logs

HANDOFF_BYTES = 128 << 20
SIZES = (16 << 10, 64 << 10, 360 << 10, 2 << 20)
MODES: tuple[Checksums, ...] = get_args(Checksums)


async def measure(block_bytes: int, rounds: int) -> dict[Checksums, float]:
    """Median milliseconds of a handoff, by mode."""
    async with AsyncExitStack() as stack:
        runs = {}
        for mode in MODES:
            spec = Spec(HANDOFF_BYTES // block_bytes, block_bytes, rounds, "scattered", checksums=mode)
            runs[mode] = await stack.enter_async_context(opened(spec))
            await runs[mode].hand_over(spec.warmups, counts=False)
        for _ in range(rounds):
            for run in runs.values():
                await run.hand_over(1)
        return {mode: run.figures().handed_p50_ms for mode, run in runs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="What the checksums of a handoff cost.")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    options = parser.parse_args()
    quiet_logs()
    found = {size: asyncio.run(measure(size, options.rounds)) for size in SIZES}
    table = Table("block", *(f"{mode}, ms" for mode in MODES), "sampled costs", "full costs")
    for size, times in found.items():
        shares = (f"{times[mode] / times['off'] - 1:.1%}" for mode in ("sampled", "full"))
        table.add_row(f"{size >> 10} KiB", *(f"{times[mode]:.2f}" for mode in MODES), *shares)
    Console(width=120).print(table)
    if options.json:
        print(json.dumps({"milliseconds": {str(size): times for size, times in found.items()}}))


if __name__ == "__main__":
    main()
