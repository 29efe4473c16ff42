"""Continuous batching with chunked prefill: which sequences run in the next step, and with how many tokens.

    submit -> waiting --admitted--> running --last token--> (returned to the owner)
                 `---------------------cancelled---------------------> removed

A step serves running sequences first, decodes before prompt chunks, then admits waiting ones in arrival order while
the token budget, the sequence limit and the KV pool allow. Sequences that own blocks already never wait behind one
that needs some.
"""

from bisect import insort
from dataclasses import dataclass

from scheduler.contract import Decode, Draw, Prefill, Row, StepPlan, StepResult
from scheduler.errors import InvariantBroken, StepInFlight
from scheduler.kv import KvAccounting
from scheduler.request import FinishReason
from scheduler.sequence import Sequence


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


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token was drawn for `sequence` and appended to its tokens; `finish` if that ended the request."""

    sequence: Sequence
    token: int
    finish: FinishReason | None


class Batcher:
    """The waiting queue and the running set of one scheduler."""

    def __init__(self, kv: KvAccounting, limits: BatchLimits) -> None:
        self.kv = kv
        self.limits = limits
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._in_flight: list[tuple[Sequence, int]] | None = None

    @property
    def step_in_flight(self) -> bool:
        return self._in_flight is not None

    def submit(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=lambda s: s.arrival)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of the queue or the running set. Only between steps."""
        if self.step_in_flight:
            raise StepInFlight("a sequence can't be removed while a step runs")
        queue = self.running if sequence in self.running else self.waiting
        queue.remove(sequence)

    def plan(self, *, may_admit_fresh: bool) -> StepPlan | None:
        """The next step, or None if nothing can run. `complete` must follow before the next plan.

        may_admit_fresh: False keeps sequences that need blocks in the queue.
        """
        if self._in_flight is not None:
            raise StepInFlight("the previous step is not settled")
        budget = self.limits.max_tokens
        chosen: list[tuple[Sequence, int]] = []
        for sequence in sorted(self.running, key=lambda s: s.pending > 1):
            budget = self._choose(sequence, budget, chosen)
        self._admit(budget, chosen, may_admit_fresh)
        if not chosen:
            return None
        self._in_flight = chosen
        rows = tuple(self._row(sequence, count) for sequence, count in chosen)
        return Decode(rows) if all(len(row.tokens) == 1 for row in rows) else Prefill(rows)

    def _choose(self, sequence: Sequence, budget: int, chosen: list[tuple[Sequence, int]]) -> int:
        count = min(sequence.pending, budget)
        if count == 0:
            return budget
        self.kv.extend(sequence)
        chosen.append((sequence, count))
        return budget - count

    def _admit(self, budget: int, chosen: list[tuple[Sequence, int]], may_admit_fresh: bool) -> None:
        admitted: list[Sequence] = []
        for sequence in self.waiting:
            if budget == 0 or len(self.running) + len(admitted) >= self.limits.max_sequences:
                break
            if not sequence.has_blocks:
                may_admit_fresh = may_admit_fresh and self.kv.admit(sequence, len(sequence.tokens), leave=1)
                if not may_admit_fresh:
                    continue
            admitted.append(sequence)
            budget = self._choose(sequence, budget, chosen)
        if admitted:
            self.waiting = [s for s in self.waiting if s not in admitted]
            self.running.extend(admitted)

    def _row(self, sequence: Sequence, count: int) -> Row:
        start = sequence.computed
        tokens = sequence.tokens[start : start + count]
        draw = self._draw(sequence) if start + count == len(sequence.tokens) else None
        return Row(sequence.request.request_id, tokens, start, sequence.blocks, draw)

    def _draw(self, sequence: Sequence) -> Draw:
        request = sequence.request
        return Draw(
            params=request.sampling,
            position=len(sequence.tokens),
            suppress=request.stop_token_ids if sequence.outputs < request.min_tokens else frozenset(),
            history=sequence.tokens if request.sampling.repetition_penalty != 1.0 else (),
        )

    def complete(self, result: StepResult) -> list[Sampled]:
        """Book a settled step: KV is computed, tokens are appended, sequences at their limit leave the running set."""
        chosen = self._take_in_flight()
        if len(result.tokens) != len(chosen):
            raise InvariantBroken(f"{len(chosen)} rows were launched, {len(result.tokens)} came back")
        sampled: list[Sampled] = []
        for (sequence, count), token in zip(chosen, result.tokens, strict=True):
            sequence.computed += count
            self.kv.publish(sequence)
            if token is None:
                continue
            sequence.tokens.append(token)
            finish = sequence.request.finish_after(sequence.outputs, token)
            if finish is not None or sequence.outputs >= sequence.output_limit:
                self.running.remove(sequence)
            sampled.append(Sampled(sequence, token, finish))
        return sampled

    def abandon(self) -> list[Sequence]:
        """Book a failed step: its sequences leave the running set, their KV is not to be trusted."""
        failed = [sequence for sequence, _ in self._take_in_flight()]
        self.running = [s for s in self.running if s not in failed]
        return failed

    def _take_in_flight(self) -> list[tuple[Sequence, int]]:
        if self._in_flight is None:
            raise InvariantBroken("no step is in flight")
        chosen, self._in_flight = self._in_flight, None
        return chosen
