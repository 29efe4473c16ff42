"""What the two schedulers share: ids, queues, blocks, steps. The owner of a sequence is told when it ends.

A scheduler is one object with one door: `apply` a command between steps, `plan` a step, `complete` or `fail` it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from scheduler.batching import Batcher, BatchLimits, Sampled
from scheduler.commands import (
    Applied,
    BoundaryEffects,
    CancelRequest,
    Command,
    CommandEffects,
    CommandResult,
    LifecycleEvent,
    Noop,
    Output,
    Submit,
    Submitted,
)
from scheduler.contract import StepPlan, StepResult
from scheduler.errors import CommandRejected, StepInFlight
from scheduler.ids import RequestId
from scheduler.kv import KvAccounting
from scheduler.request import FinishReason, Request
from scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Blocks and requests of one node. A block that several sequences share is counted once for each."""

    total: int
    free: int
    cached: int
    held: int
    reserved: int
    draining: int
    active: int
    waiting_requests: int
    running_requests: int


class SchedulerBase(ABC):
    """Commands that both sides know, and the step cycle."""

    def __init__(
        self,
        total_blocks: int,
        block_size: int,
        limits: BatchLimits,
        *,
        max_model_len: int,
        prefix_caching: bool = True,
    ) -> None:
        self.kv = KvAccounting(total_blocks, block_size, prefix_caching)
        self.batcher = Batcher(self.kv, limits)
        self.max_model_len = max_model_len
        self._sequences: dict[RequestId, Sequence] = {}
        self._arrivals = 0
        self._retired: list[RequestId] = []
        self._events: list[LifecycleEvent] = []
        self.prompt_tokens_total = 0
        self.cached_tokens_total = 0

    def apply(self, command: Command) -> CommandEffects:
        """Perform one command. Raises CommandRejected (nothing has changed) or StepInFlight (try at the boundary)."""
        if self.batcher.step_in_flight:
            raise StepInFlight(f"{type(command).__name__} came while a step runs")
        result = self._perform(command)
        return CommandEffects(result, *self._drain())

    def _perform(self, command: Command) -> CommandResult:
        match command:
            case Submit(request):
                self._start(request, output_limit=request.max_tokens)
                return Submitted(request.request_id)
            case CancelRequest(request_id):
                return self._cancel_request(request_id)
            case _:
                raise CommandRejected(f"{type(command).__name__} is not a command for a {type(self).__name__}")

    def plan(self) -> StepPlan | None:
        """The next step to launch, or None when nothing can run until a command comes."""
        return self.batcher.plan(may_admit_fresh=self._may_admit_fresh())

    def complete(self, result: StepResult) -> BoundaryEffects:
        """Settle the step that `plan` returned: the boundary."""
        outputs = tuple(self._book(sampled) for sampled in self.batcher.complete(result))
        self._at_boundary()
        events, retired = self._drain()
        return BoundaryEffects(outputs, events, retired)

    def fail(self) -> BoundaryEffects:
        """The step's device call failed: its sequences end with an error, their KV is not reused."""
        outputs = []
        for sequence in self.batcher.abandon():
            outputs.append(Output(sequence.request.request_id, sequence.outputs, None, FinishReason.ERROR))
            self._ended(sequence, FinishReason.ERROR)
        self._at_boundary()
        events, retired = self._drain()
        return BoundaryEffects(tuple(outputs), events, retired)

    def take_effects(self) -> BoundaryEffects:
        """The events and retirements that notes from the transport caused since the last command or boundary."""
        events, retired = self._drain()
        return BoundaryEffects((), events, retired)

    def _book(self, sampled: Sampled) -> Output:
        sequence = sampled.sequence
        first = sequence.outputs == 1
        if first:
            self.prompt_tokens_total += sequence.prompt_tokens
            self.cached_tokens_total += sequence.cached
        if sampled.finish is not None or sequence.outputs >= sequence.output_limit:
            self._ended(sequence, sampled.finish)
        return Output(
            request_id=sequence.request.request_id,
            index=sequence.outputs - 1,
            token=sampled.token,
            finish=sampled.finish,
            cached_tokens=sequence.cached if first else None,
        )

    def _start(self, request: Request, *, output_limit: int) -> Sequence:
        """Validate a request and put it in the waiting queue."""
        sequence = self._new_sequence(request, output_limit)
        self._sequences[request.request_id] = sequence
        self.batcher.submit(sequence)
        return sequence

    def _new_sequence(self, request: Request, output_limit: int) -> Sequence:
        if request.request_id in self._sequences:
            raise CommandRejected(f"request id {request.request_id} is already active on this node")
        length = len(request.prompt) + output_limit
        if length > self.max_model_len + 1:
            raise CommandRejected(
                f"{len(request.prompt)} prompt tokens and {output_limit} new ones exceed the model's "
                f"{self.max_model_len} positions: shorten the prompt or lower max_tokens"
            )
        sequence = Sequence(request, self._arrivals, output_limit)
        if self.kv.footprint(sequence) > self.kv.pool.total:
            raise CommandRejected(
                f"{len(request.prompt)} prompt tokens and {output_limit} new ones need "
                f"{self.kv.footprint(sequence)} KV blocks, the node has {self.kv.pool.total}: shorten the request "
                "or give the node more KV memory"
            )
        self._arrivals += 1
        return sequence

    def _retire(self, sequence: Sequence) -> None:
        """All ownership of this sequence ends here."""
        self.kv.release(sequence)
        del self._sequences[sequence.request.request_id]
        self._retired.append(sequence.request.request_id)

    def _drain(self) -> tuple[tuple[LifecycleEvent, ...], tuple[RequestId, ...]]:
        events, retired = tuple(self._events), tuple(self._retired)
        self._events.clear()
        self._retired.clear()
        return events, retired

    def _is_scheduled(self, sequence: Sequence) -> bool:
        return sequence in self.batcher.running or sequence in self.batcher.waiting

    def _cancel_request(self, request_id: RequestId) -> CommandResult:
        sequence = self._sequences.get(request_id)
        if sequence is None or not self._is_scheduled(sequence):
            return Noop()
        self._remove_scheduled(sequence)
        return Applied()

    def _remove_scheduled(self, sequence: Sequence) -> None:
        self.batcher.remove(sequence)
        self._forget(sequence)
        self._retire(sequence)
        self._at_boundary()

    def check(self) -> None:
        """Prove the block accounting. Raises InvariantBroken."""
        self.kv.pool.check(sequence.blocks for sequence in self._sequences.values())

    @property
    def is_drained(self) -> bool:
        """Nothing is owned: every block is free or cached."""
        return not self._sequences

    def occupancy(self) -> Occupancy:
        held, reserved, draining = self._parked_blocks()
        scheduled = sum(len(s.blocks) for s in self._scheduled())
        return Occupancy(
            total=self.kv.pool.total,
            free=self.kv.pool.free,
            cached=self.kv.pool.cached,
            held=held,
            reserved=reserved,
            draining=draining,
            active=scheduled,
            waiting_requests=len(self.batcher.waiting) + self._waiting_elsewhere(),
            running_requests=len(self.batcher.running),
        )

    def _scheduled(self) -> Iterator[Sequence]:
        yield from self.batcher.waiting
        yield from self.batcher.running

    @abstractmethod
    def _may_admit_fresh(self) -> bool:
        """Whether waiting sequences that need blocks may be admitted now."""

    @abstractmethod
    def _ended(self, sequence: Sequence, finish: FinishReason | None) -> None:
        """A sequence left the running set: retire it, or keep its KV."""

    @abstractmethod
    def _forget(self, sequence: Sequence) -> None:
        """Drop the handoff record of a scheduled sequence that is being cancelled."""

    @abstractmethod
    def _at_boundary(self) -> None:
        """Capacity may have changed."""

    @abstractmethod
    def _parked_blocks(self) -> tuple[int, int, int]:
        """Blocks that are (held, reserved, draining)."""

    @abstractmethod
    def _waiting_elsewhere(self) -> int:
        """Requests that wait outside the batcher's queue."""
