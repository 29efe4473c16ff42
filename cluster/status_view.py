"""`prelay status` as tables."""

from typing import Any

from rich.console import Group
from rich.table import Table

_STATES = ("total", "free", "cached", "held", "reserved", "active", "draining")


def status_view(status: dict[str, Any]) -> Group:
    """status: what GET /cluster/status answers."""
    return Group(_nodes(status), _devices(status), _links(status), _handoffs(status))


def _nodes(status: dict[str, Any]) -> Table:
    table = Table(title="Nodes: KV blocks and requests")
    table.add_column("node", no_wrap=True)
    for column in (*_STATES, "waiting", "running"):
        table.add_column(column, justify="right")
    for node in status["nodes"]:
        if "blocks" not in node:
            table.add_row(node["node"], node.get("lost") or node.get("unreachable") or "unknown")
            continue
        table.add_row(
            node["node"],
            *(str(node["blocks"][state]) for state in _STATES),
            str(node["requests"]["waiting"]),
            str(node["requests"]["running"]),
        )
    return table


def _devices(status: dict[str, Any]) -> Table:
    table = Table(title="Devices")
    columns = ("model", "device", "attention", "dtype", "max_model_len", "block_size", "block_bytes")
    for column in ("node", *columns):
        table.add_column(column.replace("_", " "))
    for node in status["nodes"]:
        if "device" in node:
            table.add_row(node["node"], *(str(node["device"][column]) for column in columns))
    return table


def _links(status: dict[str, Any]) -> Table:
    table = Table(title="Links")
    for column in ("node", "peer", "lane", "warning"):
        table.add_column(column)
    for node in status["nodes"]:
        for link in node.get("links", []):
            table.add_row(node["node"], link["peer"], link["lane"], link["warning"] or "")
    return table


def _handoffs(status: dict[str, Any]) -> Table:
    table = Table(title="Handoffs", caption=status.get("order"))
    table.add_column("state")
    table.add_column("count", justify="right")
    for name, count in status["handoffs"].items():
        if isinstance(count, int):
            table.add_row(name, str(count))
    return table
