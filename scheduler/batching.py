"""Continuous batching with chunked prefill: which sequences run in the next step, and with how many tokens.

    enqueue --> WAITING --blocks--> RUNNING --last token--> (its owner's)
    enqueue_ready --> READY --place--^   |  ^
                                preempt  |  `-- blocks again (scheduler/pressure.py)
                                         v
                        PREEMPTED | SPILLED --> RESTORING --> RUNNING

A boundary is: `prepare` (blocks for the running ones, preempting where it must; then admission), the device effects
that it asks for, `plan`, the step, `settle`. A step serves decodes first, then prompt chunks in order of admission.

Who gets blocks: running sequences before resumed ones, resumed ones before new ones. Who owns blocks already never
waits behind one that needs some.

Depth 2: while a step of nothing but decodes runs and nobody waits whom it would hold up, `plan_ahead` gives the step
after it, fed with tokens that the host has not seen. A sequence that ends with the first has over-run in the second:
its row there is not booked, and its blocks stay until that step is settled.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from scheduler.contract import Decode, DecodeFed, Prefill, StepPlan, StepResult
from scheduler.effects import Effect, EffectOutcome, MarconiCheckpoint, ReserveKv, Rollback, SsmSnapshotRestore
from scheduler.errors import InvariantBroken, StepInFlight
from scheduler.ids import BlockId
from scheduler.kv import KvAccounting
from scheduler.policies import SchedulingPolicy
from scheduler.pressure import Note, Pressure
from scheduler.queues import WaitingQueue
from scheduler.running import RunningSet, Settled
from scheduler.sequence import Sequence, SequenceState

MAX_DEPTH = 2


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """max_tokens: token budget of one step; max_sequences: rows of one step."""

    max_tokens: int = 2048
    max_sequences: int = 64

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or self.max_sequences < 1:
            raise ValueError(f"batch limits must be at least 1: {self}")
        if self.max_tokens < self.max_sequences:
            raise ValueError(f"max_tokens must cover one token for each of max_sequences: {self}")


@dataclass(slots=True)
class _Step:
    """What was launched: decodes with one token each, then chunks. reserved: blocks added for a fed step."""

    number: int
    decodes: list[Sequence]
    chunks: list[Sequence] = field(default_factory=list)
    reserved: dict[Sequence, list[BlockId]] = field(default_factory=dict)


class Batcher:
    """The waiting queues and the running set of one scheduler."""

    def __init__(self, kv: KvAccounting, limits: BatchLimits, policy: SchedulingPolicy, note: Note) -> None:
        self.kv = kv
        self.limits = limits
        self.pressure = Pressure(kv, policy, note)
        self.fed_steps = self.overruns = 0
        self._note = note
        self._headroom = policy.headroom_blocks
        self._waiting = WaitingQueue(policy.queue_key())
        self._ready = WaitingQueue(lambda sequence: sequence.arrival)
        self._is_prepared = False
        self._running = RunningSet(kv)
        self._steps: deque[_Step] = deque()
        self._launched = 0

    @property
    def steps_in_flight(self) -> int:
        return len(self._steps)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Scheduled and not running."""
        return len(self._waiting) + len(self._ready) + self.pressure.paused

    @property
    def is_idle(self) -> bool:
        return not (self.running or self.waiting)

    def running_sequences(self) -> Iterator[Sequence]:
        return iter(self._running)

    def waiting_sequences(self) -> Iterator[Sequence]:
        yield from self._waiting
        yield from self._ready
        yield from self.pressure.sequences()

    def enqueue(self, sequence: Sequence) -> None:
        """Queue a sequence that owns no blocks."""
        sequence.state = SequenceState.WAITING
        self._waiting.push(sequence)

    def enqueue_ready(self, sequence: Sequence) -> None:
        """Queue a sequence whose blocks hold the KV of all but its last token; it needs a place in the batch only."""
        sequence.state = SequenceState.READY
        self._ready.push(sequence)

    def is_in_flight(self, sequence: Sequence) -> bool:
        """Whether a launched step that is not settled computes something of it."""
        return bool(self._steps) and sequence.step >= self._steps[0].number

    def remove(self, sequence: Sequence) -> bool:
        """Take a sequence out. False if a step of it runs: it is doomed then, and `settle` gives it back."""
        match sequence.state:
            case SequenceState.WAITING:
                self._waiting.remove(sequence)
            case SequenceState.READY:
                self._ready.remove(sequence)
            case SequenceState.RUNNING:
                self._running.remove(sequence)
                if self.is_in_flight(sequence):
                    self.doom(sequence)
                    return False
            case SequenceState.PREEMPTED | SequenceState.SPILLED | SequenceState.RESTORING:
                self.pressure.remove(sequence)
            case _:
                raise InvariantBroken(f"it is {sequence.state.value}, not scheduled", sequence.request_id)
        sequence.state = SequenceState.PARKED
        return True

    @staticmethod
    def doom(sequence: Sequence) -> None:
        """It is out of the batch; `settle` gives it back with the last step that computes something of it."""
        sequence.state = SequenceState.DOOMED
        sequence.check_at = 0

    def prepare(self, *, may_admit_fresh: bool) -> tuple[Effect, ...]:
        """Find blocks and places for the next step. Returns what the device must do before it, in this order.

        may_admit_fresh: False keeps new sequences that need blocks in the queue.
        """
        self._require_settled()
        self._grow()
        room = self.limits.max_sequences - self.running
        pending = sum(s.pending for s in self._running.prefilling)
        budget = self.limits.max_tokens - len(self._running.decoding) - pending
        while room > 0:
            sequence = self._next_ready() or (self._next_admitted(may_admit_fresh) if budget > 0 else None)
            if sequence is None:
                break
            room -= 1
            if sequence.state is not SequenceState.RESTORING:
                budget -= sequence.pending
        self._is_prepared = True
        return self.pressure.take_effects()

    def _grow(self) -> None:
        """Blocks for running sequences that found none when their last one was full, for the oldest first."""
        short, self._running.short = self._running.short, []
        for sequence in sorted(short, key=lambda s: s.arrival):
            while sequence.state is SequenceState.RUNNING and not self.kv.extend(sequence):
                victim = self.pressure.victim(self._running, sequence)
                self._running.remove(victim)
                self.pressure.preempt(victim)

    def _next_ready(self) -> Sequence | None:
        """One that needs a place only. Its one token always finds room: max_tokens covers max_sequences."""
        sequence = self._ready.head()
        if sequence is None:
            return None
        self._ready.remove(sequence)
        self._running.add(sequence)
        return sequence

    def _next_admitted(self, may_admit_fresh: bool) -> Sequence | None:
        """Admit one more sequence that needs blocks, or start to restore one; None if there is none that can be."""
        if self.pressure.paused:
            resumed = self.pressure.resume(self._admission_headroom)
            if resumed is not None and resumed.state is not SequenceState.RESTORING:
                self._running.add(resumed)
            if resumed is not None or self.pressure.is_blocked:
                return resumed
        fresh = self._waiting.head() if may_admit_fresh else None
        if fresh is None or not self._admit_fresh(fresh):
            return None
        self._running.add(fresh)
        return fresh

    @property
    def _admission_headroom(self) -> int:
        return self._headroom if self.running else 0

    def _admit_fresh(self, sequence: Sequence) -> bool:
        headroom = self._admission_headroom
        probe = (self.kv.pool.generation, headroom)
        if sequence.probed == probe:
            return False
        if not self.kv.admit(sequence, len(sequence.known), leave=1, headroom=headroom):
            sequence.probed = probe
            return False
        self._waiting.remove(sequence)
        sequence.cached = sequence.start
        self._note(sequence, f"admitted, {sequence.start} tokens cached")
        return True

    def effect_settled(self, effect: Effect, outcome: EffectOutcome | None) -> None:
        """The device answered an effect of `prepare`; None if it failed. All must be settled before `plan`."""
        if isinstance(effect, MarconiCheckpoint) and outcome is None:
            self.kv.snapshots.forget(effect.snapshot)
        if isinstance(effect, SsmSnapshotRestore) and (outcome is None or not self.kv.snapshots.holds(effect.snapshot)):
            # The place holds what was there before, if the checkpoint asked for in this very boundary failed.
            self._restart(effect)
        for sequence in self.pressure.settle(effect, outcome):
            self._running.decoding.pop(sequence, None)
            self._running.add(sequence)

    def _restart(self, failed: SsmSnapshotRestore) -> None:
        """Its state can't be had, so its cached blocks are of no use: it waits again, for blocks of its own."""
        self.kv.snapshots.forget(failed.snapshot)
        sequence = next(s for s in self._running if s.request_id == failed.request_id)
        self._running.remove(sequence)
        self.kv.release(sequence, keep=False)
        sequence.start = sequence.end = sequence.cached = 0
        self._note(sequence, "its snapshot could not be restored: computed from the start")
        self.enqueue(sequence)

    def plan(self) -> StepPlan | None:
        """The next step, or None if nothing can run. `settle` or `abandon` must follow before the next one."""
        self._require_settled()
        if not self._is_prepared:
            raise StepInFlight("nothing is prepared: call prepare first")
        decodes = list(self._running.decoding)
        chunks = self._running.choose_chunks(self.limits.max_tokens - len(decodes))
        if not decodes and not chunks:
            return None
        self._launch(_Step(self._launched + 1, decodes, chunks))
        rows = (*decodes, *chunks)
        return Prefill(rows) if any(s.count > 1 for s in chunks) else Decode(rows)

    def _launch(self, step: _Step) -> None:
        self._launched = number = step.number
        self._is_prepared = False
        for sequence in step.decodes:
            sequence.step = number
        for sequence in step.chunks:
            sequence.step = number
        self._steps.append(step)

    def _require_settled(self) -> None:
        if self._steps:
            raise StepInFlight("the previous step is not settled")
        if self.pressure.has_outstanding:
            raise StepInFlight("the device has not answered all effects")

    def plan_ahead(self, *, may_admit_fresh: bool) -> tuple[DecodeFed, tuple[ReserveKv, ...]] | None:
        """The step after the one in flight, and what the device must be told before it; None where it has to wait.

        Recurrent state can't be rewound after an over-run, so a model that has it never runs ahead. Rows that reach
        their limit with the step in flight have no part in it.
        """
        if len(self._steps) != 1 or self._steps[0].chunks or self.kv.recurrent:
            return None
        if self._is_anyone_held_up(may_admit_fresh):
            return None
        rows = [
            s
            for s in self._steps[0].decodes
            if s.state is SequenceState.RUNNING and s.end + 1 < s.prompt_tokens + s.output_limit
        ]
        if not rows:
            return None
        step = _Step(self._launched + 1, rows)
        if not self._reserve_ahead(step):
            return None
        self._launch(step)
        self.fed_steps += 1
        draws = tuple(s.draw_after_next() for s in rows)
        reserved = tuple(ReserveKv(s.request_id, tuple(blocks)) for s, blocks in step.reserved.items())
        return DecodeFed(tuple(rows), draws), reserved

    def _is_anyone_held_up(self, may_admit_fresh: bool) -> bool:
        """Whether the next `prepare` may have something to do: nothing may be launched ahead of it."""
        if self._running.prefilling or self._running.short or self.pressure.paused:
            return True
        if self.running >= self.limits.max_sequences:
            return False
        fresh = self._waiting.head() if may_admit_fresh else None
        probe = (self.kv.pool.generation, self._admission_headroom)
        return len(self._ready) > 0 or (fresh is not None and fresh.probed != probe)

    def _reserve_ahead(self, step: _Step) -> bool:
        """Blocks for the fed tokens; False gives back what was taken."""
        for sequence in step.decodes:
            missing = self.kv.blocks_for(sequence.end + 1) - len(sequence.blocks)
            if missing <= 0:
                continue
            blocks = self.kv.pool.allocate(missing)
            if blocks is None:
                for other, taken in step.reserved.items():
                    self.kv.take_back(other, taken)
                return False
            sequence.blocks += blocks
            step.reserved[sequence] = blocks
        return True

    def settle(self, result: StepResult) -> Settled:
        """Book the oldest step: KV is computed, tokens are appended, sequences at their limit leave the batch."""
        step = self._take_step()
        decodes, chunks = step.decodes, step.chunks
        if len(result.tokens) != len(decodes) + len(chunks):
            raise InvariantBroken(f"{len(decodes) + len(chunks)} rows were launched, {len(result.tokens)} came back")
        settled = Settled()
        self._running.settle_decodes(decodes, result.tokens[: len(decodes)], settled)
        for sequence, token in zip(chunks, result.tokens[len(decodes) :], strict=True):
            self._running.settle_chunk(sequence, token, settled)
        self._settle_doomed(step, settled)
        return settled

    def abandon(self) -> Settled:
        """Book the oldest step as failed: its sequences leave the batch, their KV is not to be trusted."""
        step = self._take_step()
        settled = Settled()
        for sequence in (*step.decodes, *step.chunks):
            self._running.abandon(sequence, settled)
        self._settle_doomed(step, settled)
        return settled

    def _settle_doomed(self, step: _Step, settled: Settled) -> None:
        """Over-runs are told to the device; who is in a later step as well stays doomed until that is settled."""
        for sequence in settled.doomed:
            if sequence in step.reserved:
                self.pressure.tell(Rollback(sequence.request_id))
            self.overruns += 1
        settled.doomed = [s for s in settled.doomed if not self.is_in_flight(s)]

    def _take_step(self) -> _Step:
        if not self._steps:
            raise InvariantBroken("no step is in flight")
        return self._steps.popleft()

    def check(self) -> None:
        """Prove that each sequence is where its state says. Raises InvariantBroken."""
        for places, state in ((self._waiting, SequenceState.WAITING), (self._ready, SequenceState.READY)):
            for sequence in places:
                if sequence.state is not state:
                    raise InvariantBroken(
                        f"it is {sequence.state.value} in the {state.value} queue", sequence.request_id
                    )
        self._running.check()
        self.pressure.check()
