"""`prelay status` as tables."""

from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)


_STATES = ("total", "free", "cached", "held", "reserved", "active", "draining")


def status_view(status: dict[str, Any]) -> Group:
    """status: what GET /cluster/status answers."""
    return Group(_nodes(status), _devices(status), _links(status), _handoffs(status))


def _nodes(status: dict[str, Any]) -> Table:
    table = _table("Nodes: KV blocks and requests")
    table.add_column("node", no_wrap=True)
    for column in (*_STATES, "waiting", "running", "preemptions"):
        table.add_column(column, justify="right")
    for node in status["nodes"]:
        if "blocks" not in node:
            table.add_row(node["node"], "lost" if "lost" in node else "silent")
            continue
        table.add_row(
            node["node"],
            *(str(node["blocks"][state]) for state in _STATES),
            str(node["requests"]["waiting"]),
            str(node["requests"]["running"]),
            str(node["counters"]["preemptions"]),
        )
    return table


def _devices(status: dict[str, Any]) -> Table:
    table = _table("Devices")
    columns = {
        "model": "model",
        "device": "device",
        "attention": "attention",
        "dtype": "dtype",
        "longest": "max_model_len",
        "block": "block_size",
        "bytes": "block_bytes",
    }
    for column in ("node", *columns):
        table.add_column(column)
    for node in status["nodes"]:
        if "device" in node:
            table.add_row(node["node"], *(str(node["device"][field]) for field in columns.values()))
    return table


def _links(status: dict[str, Any]) -> Table:
    table = _table("Links")
    for column in ("node", "peer", "lane", "warning"):
        table.add_column(column)
    for node in status["nodes"]:
        for link in node.get("links", []):
            table.add_row(node["node"], link["peer"], link["lane"], link["warning"] or "")
    return table


def _handoffs(status: dict[str, Any]) -> Table:
    table = _table(f"Handoffs, {status['order'].replace('_', ' ')}")
    table.add_column("state")
    table.add_column("count", justify="right")
    for name, count in status["handoffs"].items():
        if isinstance(count, int):
            table.add_row(name, str(count))
    return table
