"""What a node process is started with: plain data that travels to the process."""

from dataclasses import dataclass

from scheduler.batching import BatchLimits
from scheduler.device_config import DeviceConfig
from scheduler.ids import NodeId


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """One replica. max_reservations: handoffs in flight towards a decode node. transport: a name."""

    node: NodeId
    incarnation: int
    device: DeviceConfig
    batch: BatchLimits
    max_reservations: int
    prefix_caching: bool
    transport: str
