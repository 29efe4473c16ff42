"""What a node tells the rest of the cluster, at most once per step for all its sequences."""

from dataclasses import dataclass

from handoff.exchange import Broken, Landed
from scheduler.commands import LifecycleEvent, Output
from scheduler.ids import NodeId


@dataclass(frozen=True, slots=True)
class NodeReport:
    """outputs go to the API, events and transfers to the coordinator."""

    node: NodeId
    incarnation: int
    outputs: tuple[Output, ...] = ()
    events: tuple[LifecycleEvent, ...] = ()
    transfers: tuple[Landed | Broken, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.outputs or self.events or self.transfers)
