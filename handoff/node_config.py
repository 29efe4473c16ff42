"""What a node process is started with: plain data that travels to the process."""

from dataclasses import dataclass, field

from scheduler.batching import BatchLimits
from scheduler.device_config import DeviceConfig
from scheduler.ids import NodeId
from scheduler.policies import SchedulingPolicy


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """One replica. transport: a name. lease_s: seconds without renewal after which a handoff's blocks are freed.

    max_holds: handoffs under way on a prefill node; max_reservations: in flight towards a decode node.
    layerwise_tokens: see PrefillNode. secret: the cluster's, which peers prove to each other; not shown anywhere.
    """

    node: NodeId
    incarnation: int
    device: DeviceConfig
    batch: BatchLimits
    policy: SchedulingPolicy
    max_holds: int
    max_reservations: int
    lease_s: float
    prefix_caching: bool
    transport: str
    layerwise_tokens: int
    secret: bytes = field(repr=False)
