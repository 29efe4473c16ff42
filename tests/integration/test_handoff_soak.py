"""Very many handoffs between two node processes over UCX: nothing grows, nothing is left.

300 handoffs, or 10,000 with PRELAY_SOAK set (`make soak`).
"""

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from determinism import SOAK

from cluster.handoff_bench.run import opened
from cluster.handoff_bench.spec import Spec

HANDOFFS = 10_000 if SOAK else 300
WARMUP = 2_000 if SOAK else 300
"""The stories of past requests that a node keeps are full after these, and the allocator has what it needs."""
CHECKED = 20
GROWTH_BYTES = 8 << 20
"""Far less than 10,000 handoffs would take that keep a kilobyte each."""
SPEC = Spec(blocks=8, block_bytes=16 << 10, layout="scattered", parallel=4)
SHARED = "/dev/shm/"


@dataclass(frozen=True)
class Vitals:
    """What a process holds. shared: its files of shared memory, by path."""

    resident: int
    descriptors: int
    shared: frozenset[str]

    @classmethod
    def of(cls, pid: int) -> "Vitals":
        process = Path(f"/proc/{pid}")
        pages = int((process / "statm").read_text().split()[1])
        paths = (line.split(maxsplit=5)[-1] for line in (process / "maps").read_text().splitlines())
        return cls(
            pages * os.sysconf("SC_PAGE_SIZE"),
            len(list((process / "fd").iterdir())),
            # UCX removes their names while it uses them, and the kernel says so behind the path.
            frozenset(path.removesuffix(" (deleted)") for path in paths if path.startswith(SHARED)),
        )


async def live() -> tuple[list[Vitals], list[Vitals], list[int]]:
    """What both processes hold after the warm-up and at the end, and their pids."""
    async with opened(SPEC) as run:
        await run.hand_over(WARMUP, counts=False)
        await run.settle()
        before = [Vitals.of(pid) for pid in run.pids]
        await run.hand_over(HANDOFFS)
        await run.hand_over(CHECKED, counts=False, checked=True)
        await run.settle()
        found = run.figures()
        assert found.is_sound, found
        assert (found.handoffs, found.checked) == (HANDOFFS, CHECKED)
        assert found.lane in ("shm", "cma")  # which of them, the system's huge pages decide
        return before, [Vitals.of(pid) for pid in run.pids], list(run.pids)


@pytest.mark.timeout(600)
def test_ten_thousand_handoffs_leave_nothing_behind() -> None:
    before, after, pids = asyncio.run(live())
    for then, now in zip(before, after, strict=True):
        assert now.resident - then.resident < GROWTH_BYTES, (then.resident, now.resident)
        assert now.descriptors <= then.descriptors
        assert len(now.shared) <= len(then.shared), now.shared - then.shared
    left = [path for held in (*before, *after) for path in held.shared if Path(path).exists()]
    assert left == []
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
