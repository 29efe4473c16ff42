"""Numbers about a scheduler: counters that only grow, and a snapshot of blocks, requests and work.

Source: the metrics of the project's handoff reference.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scheduler.batching import Batcher
from scheduler.kv import KvAccounting
from scheduler.sequence import Sequence, SequenceState


@dataclass(slots=True)
class Counters:
    """Since the start. prompt_tokens, cached_tokens: of requests that got their first token or were activated."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    suppressed_outputs: int = 0
    expired_leases: int = 0


@dataclass(frozen=True, slots=True)
class Moments:
    """count, sum and variance of lengths in tokens; the variance of none is 0."""

    count: int
    sum: int
    variance: float

    @classmethod
    def of(cls, lengths: Iterable[int]) -> "Moments":
        count = total = squares = 0
        for length in lengths:
            count += 1
            total += length
            squares += length * length
        return cls(count, total, (squares * count - total * total) / count**2 if count else 0.0)


@dataclass(frozen=True, slots=True)
class SchedulerMetrics:
    """Blocks, requests and work of one node.

    total, free, cached: blocks of the pool; cached ones are evictable. held, reserved, draining, active: blocks by
    owner; one that several sequences share is counted once for each. usage: share of the pool that is not available.
    running, waiting: requests; those that wait for a reservation or in one are waiting. preempted, spilled: of the
    waiting ones. published: blocks that can be found by content. lookups, hits: blocks asked of and found in the prefix
    cache since the start.
    prefills, decodes: running; tokens still to be computed, and context lengths. queued_prefills, queued_decodes: the
    same for the waiting ones; a destination before its activation is one queued decode.
    """

    total: int
    free: int
    cached: int
    held: int
    reserved: int
    draining: int
    active: int
    usage: float
    running: int
    waiting: int
    preempted: int
    spilled: int
    published: int
    lookups: int
    hits: int
    prefills: Moments
    decodes: Moments
    queued_prefills: Moments
    queued_decodes: Moments


def measure(
    kv: KvAccounting, batcher: Batcher, parked: Mapping[str, list[Sequence]], doomed_blocks: int
) -> SchedulerMetrics:
    """parked: the sequences that are not the batcher's, by "held", "queued", "pending", "reserved", "draining"."""

    def blocks(name: str) -> int:
        return sum(len(s.blocks) for s in parked.get(name, ()))

    running, waiting = list(batcher.running_sequences()), list(batcher.waiting_sequences())
    destinations = [*parked.get("pending", ()), *parked.get("reserved", ())]
    queued = [*waiting, *parked.get("queued", ())]
    states = [s.state for s in waiting]
    return SchedulerMetrics(
        total=kv.pool.total,
        free=kv.pool.free,
        cached=kv.pool.cached,
        held=blocks("held"),
        reserved=blocks("reserved"),
        draining=blocks("draining") + doomed_blocks,
        active=sum(len(s.blocks) for s in (*running, *waiting)),
        usage=1 - kv.pool.available / kv.pool.total,
        running=len(running),
        waiting=len(queued) + len(destinations),
        preempted=states.count(SequenceState.PREEMPTED),
        spilled=states.count(SequenceState.SPILLED) + states.count(SequenceState.RESTORING),
        published=kv.pool.published,
        lookups=kv.lookups,
        hits=kv.hits,
        prefills=Moments.of(s.pending for s in running if s.pending > 1),
        decodes=Moments.of(len(s.known) for s in running if s.pending <= 1),
        queued_prefills=Moments.of(s.pending for s in queued if s.pending > 1),
        queued_decodes=Moments.of(len(s.known) for s in (*[s for s in queued if s.pending <= 1], *destinations)),
    )
