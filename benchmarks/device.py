"""What a decode step costs on both routers, and how much of it the device stands idle.

    python -m benchmarks.device [--model smollm2] [--json]

The real model, the real scheduler, the circle of the step loop, one process. Busy is the time in the model and in the
draw, wherever they run; everything else of a step (scheduler, plan check, packing, reading, bookkeeping) is host work.
With the synchronous router host work and the device take turns; with the asynchronous one they run side by side.
"""

import argparse
import json
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table

from device.build import build_router
from device.model_runner import ModelRunner
from device.models import default_home, resolve_model
from scheduler.batching import BatchLimits
from scheduler.commands import Submit
from scheduler.decode_scheduler import DecodeScheduler
from scheduler.device_config import DeviceConfig
from scheduler.effects import Ticket
from scheduler.ids import RequestId
from scheduler.request import Request

SIZES = (1, 8, 32)
PROMPT = 64
ROUTERS = ("sync", "async")


class Busy:
    """Seconds that a router's device has spent on steps."""

    def __init__(self, runner: ModelRunner) -> None:
        self.seconds = 0.0
        for stage in ("feed", "forward", "draw"):
            setattr(runner, stage, self._timed(getattr(runner, stage)))

    def _timed(self, stage: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            start = perf_counter()
            try:
                return stage(*arguments)
            finally:
                self.seconds += perf_counter() - start

        return call


class Bench:
    """One router under `count` sequences that decode for ever."""

    def __init__(self, config: DeviceConfig, router: str, count: int) -> None:
        self.device = build_router(replace(config, router=router))
        self.busy = Busy(self.device.runner)
        facts = self.device.facts()
        limits = BatchLimits(max_tokens=count * PROMPT, max_sequences=count)
        self.scheduler = DecodeScheduler(
            facts.total_blocks, facts.block_size, limits, max_model_len=facts.max_model_len, prefix_caching=False
        )
        for number in range(count):
            prompt = tuple((number * 37 + i) % 1000 for i in range(PROMPT))
            self.scheduler.apply(Submit(Request(RequestId(f"request-{number}"), prompt, 1024)))
        self.flights: deque[Ticket] = deque()

    def step(self) -> None:
        """Book one step, and launch what may be launched: the step loop's circle."""
        scheduler, device = self.scheduler, self.device
        scheduler.boundary(0.0)
        if not self.flights:
            for effect in scheduler.prepare():
                scheduler.effect_settled(effect, device.apply(effect))
            plan = scheduler.plan()
            if plan is None:
                raise RuntimeError("the sequences of the benchmark have ended")
            self.flights.append(device.launch(plan))
        ahead = scheduler.plan_ahead() if device.max_depth() > len(self.flights) else None
        if ahead is not None:
            for reservation in ahead[1]:
                device.apply(reservation)
            self.flights.append(device.launch(ahead[0]))
        scheduler.settle(device.await_result(self.flights.popleft()))

    def round(self, steps: int) -> tuple[float, float]:
        """Seconds of a step, and of its busy part."""
        busy, start = self.busy.seconds, perf_counter()
        for _ in range(steps):
            self.step()
        return (perf_counter() - start) / steps, (self.busy.seconds - busy) / steps

    def close(self) -> None:
        while self.flights:
            self.device.await_result(self.flights.popleft())
        self.device.teardown()


def measure(config: DeviceConfig, count: int, rounds: int, steps: int) -> dict[str, dict[str, float]]:
    """Both routers in turns, so that both see the same machine."""
    benches = {router: Bench(config, router, count) for router in ROUTERS}
    for bench in benches.values():
        bench.round(steps)
    seconds: dict[str, list[tuple[float, float]]] = {router: [] for router in ROUTERS}
    for _ in range(rounds):
        for router, bench in benches.items():
            seconds[router].append(bench.round(steps))
    for bench in benches.values():
        bench.close()
    return {
        router: {
            "step_ms": statistics.median(step for step, _ in pairs) * 1e3,
            "idle_share": statistics.median(max(0.0, 1 - busy / step) for step, busy in pairs),
            "host_ms": statistics.median(step - busy for step, busy in pairs) * 1e3,
        }
        for router, pairs in seconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Step time and device idle share of both routers.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    options = parser.parse_args()
    folder = resolve_model(options.model, default_home(), print)
    config = DeviceConfig(
        str(folder.path), options.model, "auto", "auto", "torch", 16, 512 << 20, None, options.threads
    )
    results = {count: measure(config, count, options.rounds, options.steps) for count in SIZES}
    table = Table("sequences", "router", "step, ms", "device idle", "host work not hidden, ms")
    for count, by_router in results.items():
        for router, found in by_router.items():
            row = f"{found['step_ms']:.2f}", f"{found['idle_share']:.1%}", f"{found['host_ms']:.2f}"
            table.add_row(str(count), router, *row)
    Console().print(table)
    if options.json:
        keys = {
            name: {router: {str(count): results[count][router][name] for count in SIZES} for router in ROUTERS}
            for name in ("step_ms", "idle_share")
        }
        print(json.dumps({**keys, "host_overhead_ms_32": results[32]["sync"]["host_ms"]}))


if __name__ == "__main__":
    main()
