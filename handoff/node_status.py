"""A node's numbers as plain data, for `prelay status` and the metrics."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from handoff.step_loop import StepCounters
from handoff.transports.base import Link
from scheduler.base import SchedulerBase
from scheduler.contract import DeviceFacts

_BLOCKS = ("total", "free", "cached", "held", "reserved", "draining", "active")
_REQUESTS = ("waiting", "running", "preempted", "spilled")
_WORK = ("prefills", "decodes", "queued_prefills", "queued_decodes")


def node_status(
    scheduler: SchedulerBase, steps: StepCounters, facts: DeviceFacts, links: Sequence[Link]
) -> dict[str, Any]:
    """See docs/api.md, /cluster/status. Counters only grow; the rest is of this moment."""
    metrics = scheduler.metrics()
    return {
        "drained": scheduler.is_drained,
        "blocks": {name: getattr(metrics, name) for name in _BLOCKS},
        "requests": {name: getattr(metrics, name) for name in _REQUESTS},
        "work": {name: asdict(getattr(metrics, name)) for name in _WORK},
        "kv_usage": metrics.usage,
        "prefix_blocks": metrics.published,
        "device": asdict(facts),
        "links": [asdict(link) for link in links],
        "counters": {
            **asdict(scheduler.counters),
            **asdict(scheduler.batcher.pressure.counters),
            "overrun_rows": scheduler.batcher.overruns,
            "prefix_lookups": metrics.lookups,
            "prefix_hits": metrics.hits,
            **asdict(steps),
        },
    }
