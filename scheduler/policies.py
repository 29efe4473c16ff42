"""Scheduling policies by name: who is admitted next, who gives way, and how.

A queue policy is a static key, so that a queue of ten thousand is a heap and nothing is ever sorted again. Ageing keeps
nothing waiting for ever: all keys that grow with the time of arrival order later requests behind, whatever else they
are, and (key - now) falls at the same rate for everyone, so it need not be recomputed.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from scheduler.sequence import Sequence

QueueKey: TypeAlias = Callable[[Sequence], float]
Victim: TypeAlias = Callable[[Sequence], tuple[float, ...]]


class Preemption(Enum):
    """What happens when a running sequence finds no block.

    NONE: it can't happen; a request is admitted only if all blocks that it may ever need fit beside what is promised.
    RECOMPUTE: a victim gives up its blocks and computes its KV again later, from the prefix cache as far as it lasts.
    SPILL: a victim's KV goes to the spill store and comes back; computed again where the store has no room.
    """

    NONE = "none"
    RECOMPUTE = "recompute"
    SPILL = "spill"


def _fifo(sequence: Sequence) -> float:
    return sequence.arrival


def _priority(ageing_s: float) -> QueueKey:
    return lambda sequence: sequence.request.priority + sequence.since / ageing_s


def _shortest_prefill(ageing_tokens_per_s: float) -> QueueKey:
    return lambda sequence: len(sequence.known) + sequence.since * ageing_tokens_per_s


QUEUE_POLICIES = ("fifo", "priority", "shortest-prefill")

VICTIM_POLICIES: Mapping[str, Victim] = {
    "last": lambda s: (s.arrival,),
    "fewest-outputs": lambda s: (-s.outputs, s.arrival),
    "lowest-priority": lambda s: (s.request.priority, s.arrival),
}
"""The victim is the one with the greatest key."""


@dataclass(frozen=True, slots=True)
class SchedulingPolicy:
    """queue, victim: names, see QUEUE_POLICIES and VICTIM_POLICIES.

    priority_ageing_s: this long a wait makes up for one level of priority.
    prefill_ageing_tokens_per_s: a second's wait makes up for this many tokens of prompt.
    immunity_tokens: what a resumed sequence may sample before it can be a victim again.
    headroom_blocks: blocks that admission leaves to the running sequences.
    """

    queue: str = "fifo"
    preemption: Preemption = Preemption.RECOMPUTE
    victim: str = "last"
    priority_ageing_s: float = 10.0
    prefill_ageing_tokens_per_s: float = 100.0
    immunity_tokens: int = 16
    headroom_blocks: int = 0

    def __post_init__(self) -> None:
        _require_one_of("queue policy", self.queue, QUEUE_POLICIES)
        _require_one_of("victim policy", self.victim, VICTIM_POLICIES)
        for name in ("priority_ageing_s", "prefill_ageing_tokens_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must be over 0: without ageing requests can starve")
        for name in ("immunity_tokens", "headroom_blocks"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 0")

    def queue_key(self) -> QueueKey:
        if self.queue == "priority":
            return _priority(self.priority_ageing_s)
        if self.queue == "shortest-prefill":
            return _shortest_prefill(self.prefill_ageing_tokens_per_s)
        return _fifo

    def choose_victim(self, running: Iterable[Sequence], needy: Sequence) -> Sequence:
        """Who gives way so that `needy` can go on: one that is not immune, else `needy` itself."""
        candidates = [s for s in running if s.outputs >= s.immune_until]
        return max(candidates, key=VICTIM_POLICIES[self.victim], default=needy)


def _require_one_of(what: str, name: str, names: Iterable[str]) -> None:
    if name not in names:
        raise ValueError(f"unknown {what} {name!r}: choose one of {', '.join(names)}")
