"""Which prefill and which decode node serve a request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scheduler.ids import NodeId


@dataclass(frozen=True, slots=True)
class Route:
    source: NodeId
    destination: NodeId


def least_loaded(nodes: Sequence[NodeId], load: Mapping[NodeId, int], turn: int) -> NodeId:
    """The node with the fewest requests; ties go round by `turn`. `nodes` is not empty."""
    rotated = [nodes[(turn + i) % len(nodes)] for i in range(len(nodes))]
    return min(rotated, key=lambda node: load[node])
