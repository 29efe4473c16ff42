"""Memory pressure: who gives up its blocks, how, and how it comes back.

    RUNNING --recompute--> PREEMPTED --blocks--> RUNNING, with its KV to be computed but for what is cached
    RUNNING --spill------> SPILLED --blocks--> RESTORING --restored--> RUNNING
                              `--no room, failed--> PREEMPTED   `--failed--> RUNNING with its KV to be computed

Whatever happens to the spill store, a sequence goes on: what can't be saved or restored is computed. Paused sequences
come back in order of arrival, each as soon as blocks for all its known tokens are there.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from scheduler.effects import (
    CopyBlocks,
    Done,
    DropSequenceState,
    Effect,
    EffectOutcome,
    ReleaseSeq,
    RestoreSequenceState,
    Saved,
    SaveSequenceState,
)
from scheduler.errors import InvariantBroken
from scheduler.ids import RequestId
from scheduler.kv import KvAccounting
from scheduler.policies import Preemption, SchedulingPolicy
from scheduler.queues import WaitingQueue
from scheduler.sequence import Sequence, SequenceState

Note: TypeAlias = Callable[[Sequence, str], None]
"""Writes a line into a sequence's story."""


@dataclass(slots=True)
class PressureCounters:
    """Since the start. recomputed_tokens: KV that was computed before and had to be again, cache hits not counted."""

    preemptions: int = 0
    recomputed_tokens: int = 0
    spills: int = 0
    spill_failures: int = 0
    restores: int = 0
    restore_failures: int = 0


class Pressure:
    """Preempted and spilled sequences, and the device effects that move them."""

    def __init__(self, kv: KvAccounting, policy: SchedulingPolicy, note: Note) -> None:
        self.counters = PressureCounters()
        self._kv = kv
        self._policy = policy
        self._note = note
        self._paused = WaitingQueue(lambda sequence: sequence.arrival)
        self._saving: dict[RequestId, Sequence] = {}
        self._restoring: dict[RequestId, Sequence] = {}
        self._notices: list[Effect] = []
        self._effects: list[Effect] = []
        self._outstanding: list[Effect] = []

    @property
    def paused(self) -> int:
        return len(self._paused) + len(self._restoring)

    @property
    def is_blocked(self) -> bool:
        """Somebody waits for blocks here; new sequences must not take them."""
        return len(self._paused) > 0

    @property
    def has_outstanding(self) -> bool:
        return bool(self._outstanding)

    @property
    def has_untold(self) -> bool:
        """The device has not heard of all that it must do: a slot to be zeroed, a saved state to be dropped, ..."""
        return bool(self._notices or self._effects or self._outstanding or self._kv.has_slot_effects)

    def sequences(self) -> Iterator[Sequence]:
        yield from self._paused
        yield from self._restoring.values()

    def victim(self, running: Iterable[Sequence], needy: Sequence) -> Sequence:
        """Who gives up its blocks for `needy`; itself if nobody else can."""
        if self._policy.preemption is Preemption.NONE:
            raise InvariantBroken(
                f"no block left although {self._kv.committed} of {self._kv.pool.total} are promised", needy.request_id
            )
        return self._policy.choose_victim(running, needy)

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's blocks. It is out of the batch already."""
        self.counters.preemptions += 1
        sequence.preemptions += 1
        if self._policy.preemption is Preemption.SPILL and sequence.start:
            blocks = tuple(sequence.blocks[: self._kv.blocks_for(sequence.start)])
            self._effects.append(SaveSequenceState(sequence.request_id, blocks, sequence.start, sequence.slot))
            self._saving[sequence.request_id] = sequence
            sequence.state = SequenceState.SPILLED
            self._note(sequence, f"preempted: {sequence.start} tokens of KV go to the spill store")
        else:
            self._note(sequence, f"preempted: {sequence.start} tokens of KV are given up")
            sequence.state = SequenceState.PREEMPTED
        self._kv.release(sequence)
        if sequence.state is SequenceState.PREEMPTED:
            self._give_up_kv(sequence)
        sequence.probed = None
        self._paused.push(sequence)

    def _give_up_kv(self, sequence: Sequence) -> None:
        self.counters.recomputed_tokens += sequence.start
        sequence.start = sequence.end = 0

    def resume(self, headroom: int) -> Sequence | None:
        """Give the first paused sequence its blocks; None if they are not there. A spilled one is restored first."""
        sequence = self._paused.head()
        if sequence is None or sequence.probed == (self._kv.pool.generation, headroom):
            return None
        if sequence.request_id in self._saving:
            return None  # given up in this very boundary; whether its state was saved is not known yet
        spilled = sequence.state is SequenceState.SPILLED
        saved = sequence.start
        if not self._kv.admit(sequence, len(sequence.known), leave=1, headroom=headroom, reuse=not spilled):
            sequence.probed = (self._kv.pool.generation, headroom)
            return None
        self._paused.remove(sequence)
        sequence.immune_until = sequence.outputs + self._policy.immunity_tokens
        if not spilled:
            self.counters.recomputed_tokens -= sequence.start
            self._note(sequence, f"resumed, {sequence.start} tokens cached")
            return sequence
        blocks = tuple(sequence.blocks[: self._kv.blocks_for(saved)])
        self._effects.append(RestoreSequenceState(sequence.request_id, blocks, saved, sequence.slot))
        self._restoring[sequence.request_id] = sequence
        sequence.state = SequenceState.RESTORING
        sequence.start = saved
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """A paused sequence is cancelled; what the spill store has of it is dropped."""
        if sequence.state is SequenceState.RESTORING:
            raise InvariantBroken("removed while the device restores it", sequence.request_id)
        self._paused.remove(sequence)
        if sequence.state is SequenceState.SPILLED:
            self.tell(DropSequenceState(sequence.request_id))

    def tell(self, effect: Effect) -> None:
        """Something that the device should know before the next step; whatever it answers."""
        self._notices.append(effect)

    def take_effects(self) -> tuple[Effect, ...]:
        """What the device must do now, in this order, each to be settled: drop, keep, save, free, copy, restore."""
        restores = [e for e in self._effects if isinstance(e, RestoreSequenceState)]
        saves = [e for e in self._effects if isinstance(e, SaveSequenceState)]
        pairs = tuple((copy.source, copy.target) for copy in self._kv.copies)
        copies = [CopyBlocks(pairs)] if pairs else []
        checkpoints, releases, snapshots = self._kv.take_slot_effects()
        effects = (*self._notices, *checkpoints, *saves, *releases, *copies, *restores, *snapshots)
        self._notices, self._effects = [], []
        self._outstanding = list(effects)
        return effects

    def settle(self, effect: Effect, outcome: EffectOutcome | None) -> list[Sequence]:
        """The device's answer, None for a failure. Returns sequences to run that it made ready or put back."""
        if effect not in self._outstanding:
            raise InvariantBroken(f"{effect} was not asked for, or is settled already")
        self._outstanding.remove(effect)
        match effect:
            case CopyBlocks():
                return self._kv.settle_copies(copied=isinstance(outcome, Done))
            case SaveSequenceState(request_id=request_id):
                self._settle_save(self._saving.pop(request_id), outcome)
            case RestoreSequenceState(request_id=request_id):
                return [self._settle_restore(self._restoring.pop(request_id), outcome)]
            case ReleaseSeq(slot=slot):
                self._kv.slots.cleaned(slot)
                self._kv.pool.generation += 1
            case _:
                pass
        return []

    def _settle_save(self, sequence: Sequence, outcome: EffectOutcome | None) -> None:
        if isinstance(outcome, Saved):
            self.counters.spills += 1
            self._note(sequence, f"spilled, {outcome.size} bytes")
            return
        self.counters.spill_failures += 1
        sequence.state = SequenceState.PREEMPTED
        self._give_up_kv(sequence)
        self._note(sequence, "not spilled: the store is full" if outcome else "not spilled: the store failed")

    def _settle_restore(self, sequence: Sequence, outcome: EffectOutcome | None) -> Sequence:
        if isinstance(outcome, Done):
            self.counters.restores += 1
            self._note(sequence, f"restored, {sequence.start} tokens of KV")
        else:
            self.counters.restore_failures += 1
            self._note(sequence, "not restored: the store failed")
            self._give_up_kv(sequence)
        return sequence

    def check(self) -> None:
        """Prove that each sequence is where its state says. Raises InvariantBroken."""
        for sequence in self._paused:
            if sequence.state not in (SequenceState.PREEMPTED, SequenceState.SPILLED) or sequence.blocks:
                raise InvariantBroken(f"it is {sequence.state.value} among the paused ones", sequence.request_id)
        for sequence in self._restoring.values():
            if sequence.state is not SequenceState.RESTORING:
                raise InvariantBroken(f"it is {sequence.state.value} while it is restored", sequence.request_id)
