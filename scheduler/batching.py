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
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from scheduler.contract import Decode, Effect, EffectOutcome, Prefill, StepPlan, StepResult
from scheduler.errors import InvariantBroken, StepInFlight
from scheduler.events import Outputs
from scheduler.kv import KvAccounting
from scheduler.policies import SchedulingPolicy
from scheduler.pressure import Note, Pressure
from scheduler.queues import WaitingQueue
from scheduler.request import FinishReason
from scheduler.sequence import Sequence, SequenceState


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
class Settled:
    """What a step brought. left: sequences that leave the batch, and why their request ended if it did.

    first: those that got their first token. doomed: those that were cancelled under the step; they have no output.
    """

    outputs: Outputs = field(default_factory=Outputs)
    left: list[tuple[Sequence, FinishReason | None]] = field(default_factory=list)
    first: list[Sequence] = field(default_factory=list)
    doomed: list[Sequence] = field(default_factory=list)


@dataclass(slots=True)
class _Step:
    """What was launched: decodes with one token each, then chunks."""

    decodes: list[Sequence]
    chunks: list[Sequence]


class Batcher:
    """The waiting queues and the running set of one scheduler."""

    def __init__(self, kv: KvAccounting, limits: BatchLimits, policy: SchedulingPolicy, note: Note) -> None:
        self.kv = kv
        self.limits = limits
        self.pressure = Pressure(kv, policy, note)
        self._note = note
        self._headroom = policy.headroom_blocks
        self._waiting = WaitingQueue(policy.queue_key())
        self._ready = WaitingQueue(lambda sequence: sequence.arrival)
        self._is_prepared = False
        self._decoding: dict[Sequence, None] = {}
        self._prefilling: dict[Sequence, None] = {}
        self._short: list[Sequence] = []
        self._step: _Step | None = None

    @property
    def step_in_flight(self) -> bool:
        return self._step is not None

    @property
    def running(self) -> int:
        return len(self._decoding) + len(self._prefilling)

    @property
    def waiting(self) -> int:
        """Scheduled and not running."""
        return len(self._waiting) + len(self._ready) + self.pressure.paused

    @property
    def is_idle(self) -> bool:
        return not (self.running or self.waiting)

    def running_sequences(self) -> Iterator[Sequence]:
        yield from self._decoding
        yield from self._prefilling

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

    def remove(self, sequence: Sequence) -> bool:
        """Take a sequence out. False if a step of it runs: it is doomed then, and `settle` gives it back."""
        match sequence.state:
            case SequenceState.WAITING:
                self._waiting.remove(sequence)
            case SequenceState.READY:
                self._ready.remove(sequence)
            case SequenceState.RUNNING:
                in_flight = self._step is not None and sequence.end > sequence.start
                (self._decoding if sequence in self._decoding else self._prefilling).pop(sequence)
                if in_flight:
                    sequence.state = SequenceState.DOOMED
                    sequence.check_at = 0
                    return False
            case SequenceState.PREEMPTED | SequenceState.SPILLED | SequenceState.RESTORING:
                self.pressure.remove(sequence)
            case _:
                raise InvariantBroken(f"it is {sequence.state.value}, not scheduled", sequence.request_id)
        sequence.state = SequenceState.PARKED
        return True

    def prepare(self, *, may_admit_fresh: bool) -> tuple[Effect, ...]:
        """Find blocks and places for the next step. Returns what the device must do before it, in this order.

        may_admit_fresh: False keeps new sequences that need blocks in the queue.
        """
        self._require_settled()
        self._grow()
        room = self.limits.max_sequences - self.running
        budget = self.limits.max_tokens - len(self._decoding) - sum(s.pending for s in self._prefilling)
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
        short, self._short = self._short, []
        for sequence in sorted(short, key=lambda s: s.arrival):
            while sequence.state is SequenceState.RUNNING and not self.kv.extend(sequence):
                victim = self.pressure.victim(self.running_sequences(), sequence)
                (self._decoding if victim in self._decoding else self._prefilling).pop(victim)
                self.pressure.preempt(victim)

    def _next_ready(self) -> Sequence | None:
        """One that needs a place only. Its one token always finds room: max_tokens covers max_sequences."""
        sequence = self._ready.head()
        if sequence is None:
            return None
        self._ready.remove(sequence)
        self._run(sequence)
        return sequence

    def _next_admitted(self, may_admit_fresh: bool) -> Sequence | None:
        """Admit one more sequence that needs blocks, or start to restore one; None if there is none that can be."""
        if self.pressure.paused:
            resumed = self.pressure.resume(self._headroom if self.running else 0)
            if resumed is not None and resumed.state is not SequenceState.RESTORING:
                self._run(resumed)
            if resumed is not None or self.pressure.is_blocked:
                return resumed
        fresh = self._waiting.head() if may_admit_fresh else None
        if fresh is None or not self._admit_fresh(fresh):
            return None
        self._run(fresh)
        return fresh

    def _admit_fresh(self, sequence: Sequence) -> bool:
        headroom = self._headroom if self.running else 0
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

    def _run(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.RUNNING
        sequence.end = sequence.start
        if sequence.pending > 1:
            self._prefilling[sequence] = None
        else:
            self._start_decoding(sequence)

    def _start_decoding(self, sequence: Sequence) -> None:
        self._decoding[sequence] = None
        sequence.end = len(sequence.known)
        sequence.draw = sequence.next_draw()
        sequence.update_check_at(self.kv.block_size)
        if self._is_short(sequence):
            raise InvariantBroken(f"{len(sequence.blocks)} blocks don't cover its next token", sequence.request_id)

    def _is_short(self, sequence: Sequence) -> bool:
        return len(sequence.known) > len(sequence.blocks) * self.kv.block_size

    def effect_settled(self, effect: Effect, outcome: EffectOutcome | None) -> None:
        """The device answered an effect of `prepare`; None if it failed. All must be settled before `plan`."""
        for sequence in self.pressure.settle(effect, outcome):
            self._decoding.pop(sequence, None)
            self._run(sequence)

    def plan(self) -> StepPlan | None:
        """The next step, or None if nothing can run. `settle` or `abandon` must follow before the next one."""
        self._require_settled()
        if not self._is_prepared:
            raise StepInFlight("nothing is prepared: call prepare first")
        decodes = list(self._decoding)
        chunks = self._choose_chunks(self.limits.max_tokens - len(decodes))
        if not decodes and not chunks:
            return None
        self._step, self._is_prepared = _Step(decodes, chunks), False
        rows = (*decodes, *chunks)
        return Prefill(rows) if any(s.count > 1 for s in chunks) else Decode(rows)

    def _require_settled(self) -> None:
        if self._step is not None:
            raise StepInFlight("the previous step is not settled")
        if self.pressure.has_outstanding:
            raise StepInFlight("the device has not answered all effects")

    def _choose_chunks(self, budget: int) -> list[Sequence]:
        chunks: list[Sequence] = []
        for sequence in self._prefilling:
            if budget == 0:
                break
            count = min(sequence.pending, budget)
            budget -= count
            sequence.end = sequence.start + count
            sequence.draw = sequence.next_draw() if sequence.end == len(sequence.known) else None
            chunks.append(sequence)
        return chunks

    def settle(self, result: StepResult) -> Settled:
        """Book a step: KV is computed, tokens are appended, sequences at their limit leave the batch."""
        step = self._take_step()
        if len(result.tokens) != len(step.decodes) + len(step.chunks):
            raise InvariantBroken(
                f"{len(step.decodes) + len(step.chunks)} rows were launched, {len(result.tokens)} came back"
            )
        settled = Settled()
        if None in result.tokens[: len(step.decodes)]:
            raise InvariantBroken("a decode row brought no token")
        self._settle_decodes(step.decodes, result.tokens, settled)
        for sequence, token in zip(step.chunks, result.tokens[len(step.decodes) :], strict=True):
            self._settle_chunk(sequence, token, settled)
        return settled

    def _settle_decodes(self, decodes: list[Sequence], tokens: tuple[int | None, ...], settled: Settled) -> None:
        """The hot loop: what happens to every sequence at every step stands here, all else in `_settle_special`."""
        outputs = settled.outputs
        add_id, add_index, add_token = outputs.request_ids.append, outputs.indices.append, outputs.tokens.append
        for sequence, token in zip(decodes, tokens, strict=False):
            known = sequence.known
            length = sequence.end
            if length + 1 >= sequence.check_at or token in sequence.stops:
                self._settle_special(sequence, token, settled)  # type: ignore[arg-type]
                continue
            known.append(token)  # type: ignore[arg-type]
            sequence.start = length
            sequence.end = length + 1
            add_id(sequence.request_id)
            add_index(length - sequence.prompt_tokens)
            add_token(token)

    def _settle_special(self, sequence: Sequence, token: int, settled: Settled) -> None:
        if sequence.state is SequenceState.DOOMED:
            settled.doomed.append(sequence)
            return
        sequence.start = sequence.end
        self.kv.publish(sequence)
        self._append(sequence, token, settled)

    def _settle_chunk(self, sequence: Sequence, token: int | None, settled: Settled) -> None:
        if sequence.state is SequenceState.DOOMED:
            settled.doomed.append(sequence)
            return
        if (token is None) != (sequence.draw is None):
            raise InvariantBroken("a token without a draw, or a draw without a token", sequence.request_id)
        sequence.start = sequence.end
        self.kv.publish(sequence)
        if token is not None:
            del self._prefilling[sequence]
            self._decoding[sequence] = None
            self._append(sequence, token, settled)

    def _append(self, sequence: Sequence, token: int, settled: Settled) -> None:
        """Book a drawn token and find out what comes next for its sequence."""
        sequence.known.append(token)
        outputs, row = settled.outputs, len(settled.outputs)
        outputs.request_ids.append(sequence.request_id)
        outputs.indices.append(sequence.outputs - 1)
        outputs.tokens.append(token)
        if sequence.outputs == 1:
            outputs.cached[row] = sequence.cached
            settled.first.append(sequence)
        finish = sequence.finish_with(token)
        if finish is not None:
            outputs.finishes[row] = finish
        if finish is not None or sequence.outputs >= sequence.output_limit:
            del self._decoding[sequence]
            sequence.state = SequenceState.PARKED
            settled.left.append((sequence, finish))
            return
        sequence.end = len(sequence.known)
        if sequence.draw is None or sequence.draw.suppress:
            sequence.draw = sequence.next_draw()
        sequence.update_check_at(self.kv.block_size)
        if not self.kv.extend(sequence):
            self._short.append(sequence)

    def abandon(self) -> Settled:
        """Book a failed step: its sequences leave the batch, their KV is not to be trusted."""
        step = self._take_step()
        settled = Settled()
        for sequence in (*step.decodes, *step.chunks):
            if sequence.state is SequenceState.DOOMED:
                settled.doomed.append(sequence)
                continue
            (self._decoding if sequence in self._decoding else self._prefilling).pop(sequence)
            sequence.state = SequenceState.PARKED
            settled.left.append((sequence, FinishReason.ERROR))
        return settled

    def _take_step(self) -> _Step:
        if self._step is None:
            raise InvariantBroken("no step is in flight")
        step, self._step = self._step, None
        return step

    def check(self) -> None:
        """Prove that each sequence is where its state says. Raises InvariantBroken."""
        for places, state in (
            (self._waiting, SequenceState.WAITING),
            (self._ready, SequenceState.READY),
            (self._decoding, SequenceState.RUNNING),
            (self._prefilling, SequenceState.RUNNING),
        ):
            for sequence in places:
                if sequence.state is not state:
                    raise InvariantBroken(
                        f"it is {sequence.state.value} in the {state.value} queue", sequence.request_id
                    )
        self.pressure.check()
