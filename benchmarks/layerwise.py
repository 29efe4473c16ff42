"""When it pays to send the last prefill chunk layer by layer.

    python -m benchmarks.layerwise [--model smollm2] [--lengths 128,512] [--groups 2,4,8] [--json]

A real cluster (Ray, one prefill and one decode node, UCX), without HTTP; PRELAY_SHARED_POOLS=n in the environment for
TCP. Prompts come one at a time and are one chunk each, in turns as whole blocks (0 groups) and in each number of groups
of layers. Two times of each, medians:

    exposed  from the read of the prefill step to the last byte's landing
    ready    from the request to that landing: what the sending costs the prefill beside it is in this one
"""

import argparse
import json
import time
from typing import Any

import numpy as np
import ray
from rich.console import Console
from rich.table import Table

import cluster.launch
from benchmarks.overhead import DECODE, PREFILL, TIMEOUT_S, Bench
from prefill_node.actor import PrefillActor
from prefill_node.node import layers_told


class TunedActor(PrefillActor):
    async def tune(self, groups: int) -> None:
        """Between requests: in how many groups of layers last chunks go out; 0: as whole blocks."""
        node = self._running()
        node._layerwise_tokens = int(groups > 0)
        node._layers_told = layers_told(node._facts.layers, groups) if groups else ()


def measure(bench: Bench, name: str, length: int, groups: int) -> tuple[float, float]:
    """(exposed, ready) of one prompt, in seconds."""
    ray.get(bench.nodes[PREFILL].tune.remote(groups), timeout=TIMEOUT_S)
    request = bench.request(name, length, 2)
    start = time.monotonic()
    bench.coordinator.serve.remote(request)
    ray.get(bench.probe.wait.remote(name), timeout=TIMEOUT_S)
    sources, destinations = ray.get([bench.nodes[node].timelines.remote() for node in (PREFILL, DECODE)])
    computed = next(t["computed"] for t in reversed(sources) if t["handoff_id"].startswith(f"h-{name}"))
    landed = next(t["ended"] for t in reversed(destinations) if t["handoff_id"].startswith(f"h-{name}"))
    return landed - computed, landed - start


def main() -> None:
    parser = argparse.ArgumentParser(description="The last prefill chunk as whole blocks and layer by layer.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--lengths", default="128,512,1024", help="prompt tokens")
    parser.add_argument("--groups", default="2,4,8")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    options = parser.parse_args()
    lengths, groups = ([int(one) for one in given.split(",")] for given in (options.lengths, options.groups))
    cluster.launch.PrefillActor = TunedActor  # type: ignore[misc, attr-defined]
    bench = Bench(options.model, {"prefill.max_batch_tokens": max(lengths)})
    found: dict[tuple[int, int], list[tuple[float, float]]] = {}
    try:
        for turn in range(-1, options.rounds):
            for length in lengths:
                for number in [0, *groups]:
                    times = measure(bench, f"r{turn + 1}-{length}-{number}-", length, number)
                    if turn >= 0:  # the first turn warms up
                        found.setdefault((length, number), []).append(times)
    finally:
        bench.close()
    report(found, as_json=options.json)


def report(found: dict[tuple[int, int], list[tuple[float, float]]], *, as_json: bool) -> None:
    table = Table("tokens", "groups", "exposed ms p50", "ready ms p50")
    rows: list[dict[str, Any]] = []
    for (length, groups), times in found.items():
        exposed, ready = (float(np.median(column)) * 1e3 for column in zip(*times, strict=True))
        table.add_row(str(length), str(groups), f"{exposed:.2f}", f"{ready:.1f}")
        rows.append({"tokens": length, "groups": groups, "exposed_ms": exposed, "ready_ms": ready})
    Console().print(table)
    if as_json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
