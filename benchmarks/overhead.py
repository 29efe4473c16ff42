"""What a handoff costs beside its bytes, and what disaggregation costs a first token.

    python -m benchmarks.overhead [--model smollm2] [--json]

A real cluster (Ray, one prefill and one decode node, UCX), without HTTP. Two measurements in one run:

Overhead: from the read of the last prefill step to the launch of the first decode step, minus the exposed bytes at the
speed of memcpy, with 8 requests at a time. Steps that the decode node runs for other requests meanwhile are no overhead
and stand apart as `device`: they would run anyway. All processes share one clock.

    post    last prefill step read -> last segment posted
    wire    -> last byte landed, minus the bytes
    notify  -> booked by the step loop
    admit   -> first decode step launched

TTFT ratio: the same prompts one at a time, in turns: handed over, and on the decode node alone.
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import ray
from rich.console import Console
from rich.table import Table

from cluster.launch import launch_coordinator, launch_nodes, start_ray
from cluster.settings import load_settings
from device.models import default_home, resolve_model
from scheduler.commands import Submit
from scheduler.ids import NodeId, RequestId
from scheduler.request import Request

VOCABULARY = 40_000
MEMCPY_BYTES = 64 << 20
TIMEOUT_S = 300.0
STAGES = ("post", "wire", "notify", "admit")
PREFILL, DECODE = NodeId("prefill-0"), NodeId("decode-0")


class Probe:
    """Stands where the API stands: notes when each request's first token comes, and when its last one."""

    def __init__(self) -> None:
        self._first: dict[str, float] = {}
        self._ended: dict[str, asyncio.Event] = {}

    async def deliver(self, outputs: Any) -> None:
        now = time.monotonic()
        for output in outputs:
            self._first.setdefault(output.request_id, now)
            if output.finish is not None:
                self._ended_of(output.request_id).set()

    async def fail(self, request_id: str, reason: str) -> None:
        raise RuntimeError(f"{request_id}: {reason}")

    async def wait(self, request_id: str) -> float:
        """Until the request has ended; when its first token came."""
        await asyncio.wait_for(self._ended_of(request_id).wait(), TIMEOUT_S)
        return self._first[request_id]

    def _ended_of(self, request_id: str) -> asyncio.Event:
        return self._ended.setdefault(request_id, asyncio.Event())


@dataclass(frozen=True, slots=True)
class Overhead:
    """Of one handoff, in seconds. device: what the decode node computed for others meanwhile."""

    stages: dict[str, float]
    device: float

    @property
    def total(self) -> float:
        return sum(self.stages.values())


class Bench:
    def __init__(self, model: str, overrides: Mapping[str, object] = MappingProxyType({})) -> None:
        folder = resolve_model(model, default_home(), print)
        settings = load_settings(None, {"prefix_caching": False, **overrides})
        start_ray(settings)
        remote: Any = ray.remote(Probe)
        self.probe = remote.options(num_cpus=0).remote()
        self.coordinator = launch_coordinator(settings)
        self.nodes = launch_nodes(settings, folder, self.probe, self.coordinator)
        self.random = random.Random(1)

    def request(self, name: str, prompt: int, max_tokens: int) -> Request:
        tokens = tuple(self.random.randrange(1000, VOCABULARY) for _ in range(prompt))
        return Request(RequestId(name), tokens, max_tokens, min_tokens=max_tokens)

    def ttft(self, request: Request, handed_over: bool) -> float:
        """Seconds from the call to the first token, the request alone on the cluster."""
        start = time.monotonic()
        if handed_over:
            self.coordinator.serve.remote(request)
        else:
            self.nodes[DECODE].apply.remote(Submit(request))
        first: float = ray.get(self.probe.wait.remote(request.request_id), timeout=TIMEOUT_S)
        return first - start

    def load(self, name: str, requests: int, at_once: int, max_tokens: int) -> None:
        """A closed loop of `at_once` clients."""
        waiting = [
            self.request(f"{name}{number}", self.random.randint(64, 320), max_tokens) for number in range(requests)
        ]
        open_calls: list[Any] = []
        while waiting or open_calls:
            while waiting and len(open_calls) < at_once:
                request = waiting.pop()
                self.coordinator.serve.remote(request)
                open_calls.append(self.probe.wait.remote(request.request_id))
            _, open_calls = ray.wait(open_calls, num_returns=1, timeout=TIMEOUT_S)

    def overheads(self, name: str, bytes_per_s: float) -> list[Overhead]:
        """Of the handoffs of requests whose name begins so."""
        sources, destinations = ray.get([self.nodes[n].timelines.remote() for n in (PREFILL, DECODE)])
        records = ray.get(self.coordinator.status.remote())["recent"]
        exposed = {r["handoff_id"]: r["transfer"]["exposed_bytes"] for r in records if r["transfer"] is not None}
        by_id = {times["handoff_id"]: times for times in sources}
        return [
            _overhead(by_id[d["handoff_id"]], d, exposed[d["handoff_id"]] / bytes_per_s)
            for d in destinations
            if d["handoff_id"].startswith(f"h-{name}") and "launched" in d and d["handoff_id"] in exposed
        ]

    def close(self) -> None:
        ray.get([node.stop.remote() for node in self.nodes.values()], timeout=TIMEOUT_S)
        ray.shutdown()


def _overhead(source: dict[str, Any], destination: dict[str, Any], bytes_s: float) -> Overhead:
    landed, booked, launched = destination["ended"], destination["booked"], destination["launched"]
    busy_before_booked = max(0.0, destination["free_before_booked"] - landed)
    busy_before_launched = max(0.0, destination["free_before_launched"] - booked)
    stages = {
        "post": source["posted"] - source["computed"],
        "wire": landed - source["posted"] - bytes_s,
        "notify": booked - landed - busy_before_booked,
        "admit": launched - booked - busy_before_launched,
    }
    return Overhead(stages, busy_before_booked + busy_before_launched)


def memcpy_bytes_per_s() -> float:
    """The best of several copies of host memory that no cache holds."""
    source, target = np.ones(MEMCPY_BYTES, np.uint8), np.zeros(MEMCPY_BYTES, np.uint8)
    best = 0.0
    for _ in range(7):
        start = time.perf_counter()
        target[:] = source
        best = max(best, MEMCPY_BYTES / (time.perf_counter() - start))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description="Handoff overhead, and TTFT against the same engine colocated.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=64, help="of the overhead part")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=12, help="prompts of each length of the TTFT part")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    options = parser.parse_args()
    bench = Bench(options.model)
    try:
        bench.load("warm", 8, options.at_once, 4)
        ttfts = {length: ttft_pairs(bench, length, options.rounds) for length in (128, 512)}
        bench.load("load", options.requests, options.at_once, 32)
        found = bench.overheads("load", memcpy_bytes_per_s())
    finally:
        bench.close()
    report(found, ttfts, as_json=options.json)


def ttft_pairs(bench: Bench, length: int, rounds: int) -> list[tuple[float, float]]:
    """(handed over, colocated) of the same prompt, in turns; which goes first alternates."""
    pairs = []
    for number in range(rounds):
        request = bench.request("", length, 4)
        taken = {}
        for handed_over in (True, False) if number % 2 else (False, True):
            name = RequestId(f"ttft-{length}-{number}-{handed_over}")
            taken[handed_over] = bench.ttft(Request(name, request.prompt, 4, min_tokens=4), handed_over)
        pairs.append((taken[True], taken[False]))
    return pairs


def report(found: list[Overhead], ttfts: dict[int, list[tuple[float, float]]], *, as_json: bool) -> None:
    table = Table("ms", "p50", "p99")
    columns = {
        **{stage: [one.stages[stage] for one in found] for stage in STAGES},
        "overhead": [one.total for one in found],
        "device": [one.device for one in found],
    }
    for name, values in columns.items():
        table.add_row(name, *(f"{np.percentile(values, p) * 1e3:.2f}" for p in (50, 99)))
    console = Console()
    console.print(table)
    ratios = {}
    for length, pairs in ttfts.items():
        handed, alone = (float(np.median(column)) for column in zip(*pairs, strict=True))
        ratios[length] = float(np.median([a / b for a, b in pairs]))
        console.print(f"TTFT of {length} tokens: {handed * 1e3:.1f} ms handed over, {alone * 1e3:.1f} ms colocated")
    if as_json:
        total = columns["overhead"]
        print(
            json.dumps(
                {
                    "overhead_ms_p50": float(np.percentile(total, 50)) * 1e3,
                    "overhead_ms_p99": float(np.percentile(total, 99)) * 1e3,
                    "breakdown_ms_p50": {stage: float(np.median(columns[stage])) * 1e3 for stage in STAGES},
                    "device_ms_p50": float(np.median(columns["device"])) * 1e3,
                    "ttft_ratio": float(np.median(list(ratios.values()))),
                    "ttft_ratio_by_length": {str(length): ratio for length, ratio in ratios.items()},
                    "handoffs": len(found),
                }
            )
        )


if __name__ == "__main__":
    main()
