"""The cluster's status as Prometheus metrics. Anything missing or odd in a status is left out, never an error."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, UnknownMetricFamily
from prometheus_client.registry import Collector

_NODE_LABELS = ["node", "role", "state"]
_OWN_NAMES = frozenset(
    {
        "prelay_up",
        "prelay_blocks",
        "prelay_requests",
        "prelay_kv_usage",
        "prelay_prefix_blocks",
        "prelay_work_requests",
        "prelay_work_tokens",
        "prelay_work_tokens_variance",
        "prelay_handoffs",
        "prelay_handoffs_active",
    }
)


def render_status(status: Mapping[str, Any] | None, taken: frozenset[str]) -> bytes:
    """Metrics text of a `Gateway.status()`; None (no answer) gives `prelay_up 0` only.

    `taken` are the metric names that stand beside these: one name twice would spoil the whole scrape.
    """
    registry = CollectorRegistry()
    registry.register(_StatusCollector(status, taken | _OWN_NAMES))
    return generate_latest(registry)


class _StatusCollector(Collector):
    def __init__(self, status: Mapping[str, Any] | None, taken: frozenset[str]) -> None:
        self._status = status
        self._taken = taken

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("prelay_up", "1 when the cluster answered", value=0 if self._status is None else 1)
        if self._status is None:
            return
        nodes = [_mapping(node) for node in _list(self._status.get("nodes"))]
        yield _per_node("prelay_blocks", "KV blocks of a node by state", "blocks", nodes)
        yield _per_node("prelay_requests", "Requests on a node by state", "requests", nodes)
        yield _value(
            "prelay_kv_usage", "Share of a node's KV blocks that is neither free nor cached", "kv_usage", nodes
        )
        yield _value("prelay_prefix_blocks", "KV blocks that can be found by content", "prefix_blocks", nodes)
        yield from _work(nodes)
        yield from _handoffs(_mapping(self._status.get("handoffs")))
        yield from _counters(_mapping(self._status.get("counters")), self._taken)


def _per_node(name: str, help_text: str, key: str, nodes: list[Mapping[str, Any]]) -> Metric:
    family = GaugeMetricFamily(name, help_text, labels=_NODE_LABELS)
    samples = {(*_labels(node), state): value for node in nodes for state, value in _numbers(_mapping(node.get(key)))}
    for labels, value in samples.items():
        family.add_metric(labels, value)
    return family


def _value(name: str, help_text: str, key: str, nodes: list[Mapping[str, Any]]) -> Metric:
    family = GaugeMetricFamily(name, help_text, labels=_NODE_LABELS[:2])
    values = {_labels(node): node.get(key) for node in nodes}
    for labels, value in values.items():
        if isinstance(value, int | float):
            family.add_metric(labels, value)
    return family


def _work(nodes: list[Mapping[str, Any]]) -> Iterator[Metric]:
    """Moments of what a node has to do, by kind: prefills, decodes, queued_prefills, queued_decodes."""
    parts = {
        "count": ("prelay_work_requests", "Requests on a node by kind of work"),
        "sum": ("prelay_work_tokens", "Tokens to compute (prefills) or in context (decodes) on a node"),
        "variance": ("prelay_work_tokens_variance", "Variance of those tokens over the requests"),
    }
    for part, (name, help_text) in parts.items():
        family = GaugeMetricFamily(name, help_text, labels=[*_NODE_LABELS[:2], "kind"])
        samples = {
            (*_labels(node), str(kind)): dict(_numbers(_mapping(moments))).get(part)
            for node in nodes
            for kind, moments in _mapping(node.get("work")).items()
        }
        for labels, value in samples.items():
            if value is not None:
                family.add_metric(labels, value)
        yield family


def _labels(node: Mapping[str, Any]) -> tuple[str, str]:
    return str(node.get("node", "unknown")), str(node.get("role", "unknown"))


def _handoffs(handoffs: Mapping[str, Any]) -> Iterator[Metric]:
    ended = CounterMetricFamily("prelay_handoffs", "Ended handoffs by outcome", labels=["outcome"])
    for outcome, value in _numbers(handoffs):
        if outcome == "active":
            yield GaugeMetricFamily("prelay_handoffs_active", "Handoffs under way", value=value)
        else:
            ended.add_metric([outcome], value)
    yield ended


def _counters(counters: Mapping[str, Any], taken: frozenset[str]) -> Iterator[Metric]:
    """Each under its own name: Prometheus lets only names that end in `_total` be counters."""
    seen = set(taken)
    for key, value in _numbers(counters):
        name = "prelay_" + re.sub(r"\W", "_", key, flags=re.ASCII)
        family = name.removesuffix("_total")
        if family in seen:
            family = f"prelay_counter_{family.removeprefix('prelay_')}"
        seen.add(family)
        is_total = name.endswith("_total")
        kind = CounterMetricFamily if is_total else UnknownMetricFamily
        yield kind(family, "A counter of the cluster", value=value)


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        if isinstance(value, int | float):
            yield str(key), value


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []
