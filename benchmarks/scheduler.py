"""What the scheduler costs: a step decision by size, commands, memory, prefix lookups. No device, no clock of its own.

    python -m benchmarks.scheduler [--json]

A step decision is the whole circle but the step itself: boundary, prepare, plan, settle. Sequences have prompts of
different lengths, so that in each step one in `BLOCK_SIZE` fills a block, takes the next and publishes the old one.
"""

import argparse
import gc
import json
import statistics
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table

from scheduler.base import SchedulerBase
from scheduler.batching import BatchLimits
from scheduler.blocks import BlockPool
from scheduler.commands import (
    ActivateDestination,
    CancelDestination,
    CancelRequest,
    CancelSource,
    Command,
    ReleaseSource,
    ReserveDestination,
    Submit,
    SubmitHandoffPrefill,
)
from scheduler.contract import StepPlan, StepResult
from scheduler.decode_scheduler import DecodeScheduler
from scheduler.effects import Ticket
from scheduler.ids import BlockId, HandoffId, RequestId
from scheduler.prefill_scheduler import PrefillScheduler
from scheduler.prefix import extend_chain
from scheduler.request import Request

BLOCK_SIZE = 16
PROMPT = 32
"""Tokens of the shortest prompt; sequence i has i % BLOCK_SIZE more."""
SIZES = (1, 64, 256, 1024, 10_000)
TOKEN = 7
MAX_TOKENS = 256
"""More than the warm-up and the measured steps take."""


def request(number: int, max_tokens: int = MAX_TOKENS) -> Request:
    prompt = tuple((number * 31 + i) % 50_000 for i in range(PROMPT + number % BLOCK_SIZE))
    return Request(RequestId(f"request-{number}"), prompt, max_tokens)


def scheduler(blocks: int, rows: int) -> DecodeScheduler:
    limits = BatchLimits(max_tokens=max(rows * (PROMPT + BLOCK_SIZE), 2048), max_sequences=rows)
    return DecodeScheduler(blocks, BLOCK_SIZE, limits, max_model_len=1 << 20)


def decide(one: DecodeScheduler) -> StepPlan | None:
    one.boundary(0.0)
    if one.prepare():
        raise RuntimeError("this benchmark has no device for effects")
    return one.plan()


def settle(one: DecodeScheduler, plan: StepPlan) -> None:
    one.settle(StepResult(Ticket(0), tuple(TOKEN if row.draw else None for row in plan.rows)))


def running(count: int, waiting: int = 0) -> DecodeScheduler:
    """`count` sequences that decode, and `waiting` more that find no place."""
    one = scheduler(blocks=count * 24 + 64, rows=count)
    for number in range(count + waiting):
        one.apply(Submit(request(number)))
    while True:
        plan = decide(one)
        assert plan is not None
        settle(one, plan)
        if len(plan.rows) == count and all(row.end - row.start == 1 for row in plan.rows):
            one.boundary(0.0)
            return one


def step_seconds(one: DecodeScheduler, rounds: int) -> float:
    """Seconds of one decision: median over rounds of the mean of one round, in which every sequence fills one block."""
    result = StepResult(Ticket(0), (TOKEN,) * one.batcher.running)
    means = []
    for _ in range(rounds):
        start = perf_counter()
        for _ in range(BLOCK_SIZE):
            decide(one)
            one.settle(result)
        means.append((perf_counter() - start) / BLOCK_SIZE)
    return statistics.median(means)


@dataclass(frozen=True, slots=True)
class Lives:
    """Commands of one kind of request, in the order of its life; all eight occur. `land`: what lies between them."""

    scheduler: SchedulerBase
    commands: list[tuple[Command, ...]]
    land: Callable[[int], object] | None = None


def lives(count: int) -> dict[str, Lives]:
    requests = [request(number) for number in range(count)]
    names = [HandoffId(f"handoff-{number}") for number in range(count)]
    pairs = list(zip(names, requests, strict=True))
    decode = scheduler(blocks=4096, rows=256)
    prefill = PrefillScheduler(4096, BLOCK_SIZE, BatchLimits(), max_model_len=1 << 20)
    return {
        "local": Lives(decode, [(Submit(r), CancelRequest(r.request_id)) for r in requests]),
        "cancelled source": Lives(prefill, [(SubmitHandoffPrefill(h, r), CancelSource(h)) for h, r in pairs]),
        "released source": Lives(
            prefill, [(SubmitHandoffPrefill(h, r), ReleaseSource(h), CancelRequest(r.request_id)) for h, r in pairs]
        ),
        "destination": Lives(
            decode,
            [(ReserveDestination(h, r), ActivateDestination(h), CancelDestination(h)) for h, r in pairs],
            lambda number: decode.landed(names[number], 1, TOKEN),
        ),
    }


def commands_per_second(rounds: int, count: int = 256) -> dict[str, float]:
    """By kind of life, and "all": as many lives of each kind. The best of the rounds, as of a quiet machine."""
    seconds: dict[str, float] = {}
    kinds = lives(count)
    for _ in range(rounds):
        for name, kind in kinds.items():
            seconds[name] = min(seconds.get(name, inf), _live(kind))
    commands = {name: sum(map(len, kind.commands)) for name, kind in kinds.items()}
    rates = {name: commands[name] / seconds[name] for name in kinds}
    return {**rates, "all": sum(commands.values()) / sum(seconds.values())}


def _live(kind: Lives) -> float:
    apply, land = kind.scheduler.apply, kind.land
    start = perf_counter()
    for number, (first, *others) in enumerate(kind.commands):
        apply(first)
        if land is not None:
            land(number)
        for command in others:
            apply(command)
    return perf_counter() - start


def bytes_per_sequence(count: int = 2000) -> float:
    """Memory of one running sequence with its tokens, blocks, hashes and story; the request itself is the caller's."""
    requests = [request(number) for number in range(count)]
    one = scheduler(blocks=count * 4, rows=count)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for each in requests:
        one.apply(Submit(each))
    plan = decide(one)
    assert plan is not None
    settle(one, plan)
    one.boundary(0.0)
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return used / count


def lookups_per_second(cached: int = 1_000_000, prefix_blocks: int = 64, seconds: float = 1.0) -> float:
    """Blocks found per second in a pool with `cached` cached blocks, by prompts of `prefix_blocks` cached blocks."""
    pool = BlockPool(cached)
    chains: list[list[bytes]] = []
    for number in range(cached // prefix_blocks):
        chain: list[bytes] = []
        extend_chain(chain, range(number, number + prefix_blocks * BLOCK_SIZE), BLOCK_SIZE)
        blocks: list[BlockId] = pool.allocate(prefix_blocks) or []
        for block, name in zip(blocks, chain, strict=True):
            pool.publish(block, name)
        pool.release(blocks)
        chains.append(chain)
    found, start, stride = 0, perf_counter(), 7919
    turn = 0
    while perf_counter() - start < seconds:
        for _ in range(64):
            turn = (turn + stride) % len(chains)
            found += len(pool.match(chains[turn]))
    return found / (perf_counter() - start)


def measure(rounds: int) -> dict[str, Any]:
    per_sequence: dict[str, float] = {}
    step_ms: dict[str, float] = {}
    for size in SIZES:
        seconds = step_seconds(running(size), rounds)
        step_ms[str(size)] = seconds * 1e3
        per_sequence[str(size)] = seconds / size * 1e6
    scaling = [per_sequence[str(size)] for size in SIZES if size >= 64]
    rates = commands_per_second(20 * rounds)
    return {
        "step_ms": step_ms,
        "step_ms_256": step_ms["256"],
        "step_ms_256_with_10000_waiting": step_seconds(running(256, waiting=10_000), rounds) * 1e3,
        "per_sequence_us": per_sequence,
        "flatness": max(scaling) / min(scaling),
        "commands_per_s": rates["all"],
        "commands_per_s_by_life": rates,
        "bytes_per_sequence": bytes_per_sequence(),
        "lookups_per_s": lookups_per_second(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of the scheduler's decisions.")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of 16 steps per size")
    arguments = parser.parse_args()
    result = measure(arguments.rounds)
    table = Table("running", "step, ms", "per sequence, us")
    for size in map(str, SIZES):
        table.add_row(size, f"{result['step_ms'][size]:.3f}", f"{result['per_sequence_us'][size]:.3f}")
    console = Console()
    console.print(table)
    for name in ("step_ms_256_with_10000_waiting", "flatness", "commands_per_s", "bytes_per_sequence", "lookups_per_s"):
        console.print(f"{name}: {result[name]:,.3f}")
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
