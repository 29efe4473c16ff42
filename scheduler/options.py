"""What both schedulers may be told beyond their sizes."""

from typing import TypedDict

from scheduler.kv import KvAccounting
from scheduler.policies import Preemption, SchedulingPolicy
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


def policy_of(options: SchedulerOptions) -> SchedulingPolicy:
    return options.get("policy", SchedulingPolicy())


def accounting(total_blocks: int, block_size: int, options: SchedulerOptions) -> KvAccounting:
    """The KV accounting of a scheduler with these options."""
    return KvAccounting(
        total_blocks,
        block_size,
        options.get("prefix_caching", True),
        guaranteed=policy_of(options).preemption is Preemption.NONE,
        kv_events=options.get("kv_events", False),
        state=options.get("state", SlotLimits()),
    )
