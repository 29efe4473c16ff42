"""Proof that a scheduler's books add up: every block, slot and sequence is in exactly one place."""

from collections.abc import Iterable

from scheduler.batching import Batcher
from scheduler.effects import NO_SLOT
from scheduler.errors import InvariantBroken
from scheduler.kv import KvAccounting
from scheduler.sequence import SCHEDULED, Sequence, SequenceState


def prove(kv: KvAccounting, batcher: Batcher, sequences: Iterable[Sequence], doomed: Iterable[Sequence]) -> None:
    """sequences: by request id, alive for the outside. doomed: still in a running step. Raises InvariantBroken."""
    alive = list(sequences)
    owners = [*alive, *doomed]
    batcher.check()
    kv.pool.check([*(s.blocks for s in owners), *([copy.source] for copy in kv.copies)])
    kv.slots.check({s.slot: s.request_id for s in owners if s.slot != NO_SLOT})
    scheduled = sum(s.state in SCHEDULED for s in alive)
    if scheduled != batcher.running + batcher.waiting:
        raise InvariantBroken(
            f"{scheduled} sequences are scheduled, the batcher has {batcher.running} running, {batcher.waiting} waiting"
        )
    committed = sum(s.committed for s in owners)
    if committed != kv.committed:
        raise InvariantBroken(f"{kv.committed} blocks are promised, sequences have {committed}")


def leaves_device_alone(sequences: Iterable[Sequence]) -> bool:
    """Whether none of them has anything on the device or in its spill store."""
    return not any(s.blocks or s.state is SequenceState.SPILLED for s in sequences)
