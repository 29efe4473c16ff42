"""What both schedulers may be told beyond their sizes."""

from typing import TypedDict

from scheduler.policies import SchedulingPolicy
from scheduler.slots import SlotLimits


class SchedulerOptions(TypedDict, total=False):
    """prefix_caching: on unless False. policy: queueing and preemption.

    lease_s: seconds without progress after which a hold or reservation is cancelled; never unless given.
    incarnation: which life of the node this is. kv_events: whether `boundary` reports stored and removed blocks.
    state: the device's slot-addressed state; none unless given.
    """

    prefix_caching: bool
    policy: SchedulingPolicy
    lease_s: float
    incarnation: int
    kv_events: bool
    state: SlotLimits
