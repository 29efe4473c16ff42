"""What a node tells the rest of the cluster, at most once per boundary for all its sequences."""

from collections.abc import Sequence
from dataclasses import dataclass

from handoff.transfer_ends import Broken, Landed
from scheduler.events import LifecycleEvent, Output
from scheduler.ids import NodeId


@dataclass(frozen=True, slots=True)
class NodeReport:
    """outputs go to the API, events and transfers to the coordinator."""

    node: NodeId
    incarnation: int
    outputs: Sequence[Output] = ()
    events: tuple[LifecycleEvent, ...] = ()
    transfers: tuple[Landed | Broken, ...] = ()
