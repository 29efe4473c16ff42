"""The nodes of a running server, and each pair of a prefill and a decode node."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from cluster.doctor.finding import Finding, Level
from cluster.doctor.ucx_settings_checks import check_settings
from handoff.compatibility import Compatibility

_RESTART = "Then restart the server."

Node = Mapping[str, Any]
Status = Mapping[str, Any]


def check_cluster(status: Status) -> list[Finding]:
    """status: what GET /cluster/status answers."""
    nodes = status["nodes"]
    answering = [node for node in nodes if "role" in node]
    missing = [_missing_role(role) for role in status["missing_roles"]]
    silent = [_silent(node) for node in nodes if "role" not in node]
    return [*missing, *silent, *([_answer(answering)] if answering else []), *_pairs(answering)]


def check_server_settings(environ: Mapping[str, str]) -> list[Finding]:
    """environ: what the server was started with, which may not be what the doctor was."""
    return [
        replace(
            finding, title=f"Settings of the server: {finding.title}", what_to_do=f"{finding.what_to_do} {_RESTART}"
        )
        for finding in check_settings(environ)
        if finding.is_bad
    ]


def no_status(url: str, reason: str) -> Finding:
    """The server doesn't say what its nodes do."""
    return Finding(
        Level.BROKEN,
        "The server does not answer",
        f"{url} gave no status: {reason}.",
        "Check the address, and the logs in Ray's session folder; restart the server if it hangs.",
    )


def no_server() -> Finding:
    return Finding(
        Level.NOTE,
        "No running server",
        "Only this machine was checked. With a running server (or --url) nodes and pairs are checked too.",
    )


def largest_pool(status: Status) -> int:
    """Bytes of the largest KV pool; 0 if no node answers."""
    devices = [node["device"] for node in status["nodes"] if "device" in node]
    return max((device["total_blocks"] * device["block_bytes"] for device in devices), default=0)


def _missing_role(role: str) -> Finding:
    what = f"No {role} node is alive, so no request can be served."
    return Finding(Level.BROKEN, f"No {role} node", what, "Restart the server.")


def _silent(node: Node) -> Finding:
    name = node["node"]
    if "lost" in node:
        what, todo = f"It was lost: {node['lost']}", "Restart the server to have it back; its log says why it ended."
        return Finding(Level.BROKEN, f"{name} is lost", what, todo)
    what = f"It gave no status: {node.get('unreachable', 'no reason is known')}"
    return Finding(Level.BROKEN, f"{name} does not answer", what, "See its log; restart the server if it hangs.")


def _answer(nodes: list[Node]) -> Finding:
    return Finding(Level.OK, "Nodes that answer", f"{', '.join(node['node'] for node in nodes)}.")


def _pairs(nodes: list[Node]) -> list[Finding]:
    sources = [node for node in nodes if node["role"] == "prefill"]
    destinations = [node for node in nodes if node["role"] == "decode"]
    return [finding for pair in product(sources, destinations) for finding in check_pair(*pair)]


def check_pair(source: Node, destination: Node) -> list[Finding]:
    """The link as both ends see it, and whether they agree on what KV is."""
    title = f"{source['node']} -> {destination['node']}"
    ends = [_link(source, destination["node"]), _link(destination, source["node"])]
    links = [link for link in ends if link is not None]
    differing = _differing(source, destination)
    if len(links) < len(ends):
        return [_unlinked(title, differing)]
    return [_lane(title, links), *([_relaid(title, differing)] if differing else [])]


def _link(node: Node, peer: str) -> Mapping[str, Any] | None:
    return next((link for link in node["links"] if link["peer"] == peer), None)


def _differing(source: Node, destination: Node) -> str:
    """Fields of the compatibility digest that differ, in words; empty if none do."""
    here, there = (Compatibility(**node["compatibility"]) for node in (source, destination))
    if here.digest() == there.digest():
        return ""
    names = here.differing(there)
    return "; ".join(f"{name} is {getattr(here, name)} and {getattr(there, name)}" for name in names)


def _unlinked(title: str, differing: str) -> Finding:
    if differing:
        todo = "Start both with the same model and settings."
        return Finding(Level.BROKEN, title, f"They are not joined, and can't exchange KV: {differing}.", todo)
    what = "They are not joined: one has given the other up."
    return Finding(Level.BROKEN, title, what, "See the logs of both; restart the server to join them anew.")


def _relaid(title: str, differing: str) -> Finding:
    return Finding(Level.NOTE, title, f"They differ, and KV is re-laid out between them: {differing}.")


def _lane(title: str, links: list[Mapping[str, Any]]) -> Finding:
    lanes = "/".join(sorted({link["lane"] for link in links}))
    warnings = sorted({link["warning"] for link in links if link["warning"]})
    if warnings:
        todo = "Change that in the environment of `prelay serve`, and restart it."
        return Finding(Level.SLOW, f"{title}: {lanes}", " ".join(warnings), todo)
    return Finding(Level.OK, f"{title}: {lanes}", "Joined, no warning.")
