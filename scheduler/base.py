"""What the two schedulers share: ids, queues, blocks, steps, time. The owner of a sequence is told when it ends.

A scheduler is one object with one door. Its user goes round this circle:

    apply commands, note transfers --> boundary(now) --> prepare, effect_settled... --> plan --> step --> settle | fail
          ^                                                                                               |
          `-----------------------------------------------------------------------------------------------'

What a settled step brought is kept back until the next `boundary`, so a cancel that came while the step ran still
suppresses it. While a step runs, commands that start something and CancelRequest are applied, all others raise
StepInFlight.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import inf
from typing import Unpack

from scheduler.acceptance import require_servable
from scheduler.batching import Batcher, BatchLimits
from scheduler.commands import (
    MID_STEP,
    Applied,
    CancelDestination,
    CancelRequest,
    CancelSource,
    Command,
    CommandEffects,
    CommandResult,
    Noop,
    Submit,
    Submitted,
)
from scheduler.contract import DecodeFed, StepPlan, StepResult
from scheduler.door import door
from scheduler.effects import Effect, EffectOutcome
from scheduler.errors import CommandRejected, InvariantBroken, StaleIncarnation, StepInFlight
from scheduler.events import BoundaryEffects, LifecycleEvent, Output, Outputs
from scheduler.ids import HandoffId, RequestId
from scheduler.inventory import Holding, Inventory
from scheduler.leases import Leases
from scheduler.metrics import Counters, SchedulerMetrics, measure
from scheduler.options import SchedulerOptions, accounting, policy_of
from scheduler.proof import leaves_device_alone, prove
from scheduler.request import FinishReason, Request
from scheduler.retained import Retained
from scheduler.running import Settled
from scheduler.sequence import SCHEDULED, Sequence, SequenceState
from scheduler.story import StoryBook, StoryLine


class SchedulerBase(ABC):
    """Commands that both sides know, and the step cycle. options: see SchedulerOptions."""

    def __init__(
        self,
        total_blocks: int,
        block_size: int,
        limits: BatchLimits,
        *,
        max_model_len: int,
        **options: Unpack[SchedulerOptions],
    ) -> None:
        policy = policy_of(options)
        self.kv = accounting(total_blocks, block_size, options)
        self.batcher = Batcher(self.kv, limits, policy, self._note)
        self.max_model_len = max_model_len
        self.incarnation = options.get("incarnation", 1)
        self.counters = Counters()
        self.now = 0.0
        self._steps = 0
        self._between_steps = True
        self.is_admission_held = False
        self._leases = Leases(options.get("lease_s", inf))
        self._stories = StoryBook()
        self._sequences: dict[RequestId, Sequence] = {}
        self._doomed: dict[Sequence, None] = {}
        self._arrivals = 0
        self._retained = Retained()
        self._retired: list[RequestId] = []
        self._events: list[LifecycleEvent] = []

    # Commands

    @door
    def apply(self, command: Command, incarnation: int | None = None) -> CommandEffects:
        """Perform one command. incarnation: the life of the node that the sender means; None for whichever it is.

        Raises CommandRejected, StaleIncarnation or StepInFlight (apply it at the boundary); nothing has changed then.
        """
        if incarnation is not None and incarnation != self.incarnation:
            raise StaleIncarnation(
                f"{type(command).__name__} is for incarnation {incarnation} of this node, which is at "
                f"{self.incarnation}: what it addresses is gone"
            )
        if self._is_mid_step and not isinstance(command, MID_STEP):
            raise StepInFlight(f"{type(command).__name__} came while a step runs: apply it at the boundary")
        if self.batcher.pressure.has_outstanding:
            raise StepInFlight(f"{type(command).__name__} came before the device answered all effects")
        target = None if self._retained.is_empty else self._suppression_target(command)
        result = self._perform(command)
        suppressed = False
        if target is not None:
            result, suppressed = self._suppress(command, target, result)
        if isinstance(result, Applied) and not self._is_mid_step:
            self._retry_pending()
        return self._take_effects(result, suppressed)

    def _take_effects(self, result: CommandResult, suppressed: bool) -> CommandEffects:
        if not self._events and not self._retired:
            return CommandEffects(result, (), (), suppressed, self.incarnation)
        events, self._events = tuple(self._events), []
        retired, self._retired = tuple(self._retired), []
        return CommandEffects(result, events, retired, suppressed, self.incarnation)

    def _perform(self, command: Command) -> CommandResult:
        match command:
            case Submit(request):
                self._start(request, output_limit=request.max_tokens)
                return Submitted(request.request_id)
            case CancelRequest(request_id):
                return self._cancel_request(request_id)
            case _:
                raise CommandRejected(f"{type(command).__name__} is not a command for a {type(self).__name__}")

    def _suppression_target(self, command: Command) -> RequestId | None:
        """Whose retained outputs a cancelling command may suppress."""
        match command:
            case CancelRequest(request_id):
                return request_id
            case CancelSource(handoff_id, attempt) | CancelDestination(handoff_id, attempt):
                return self._request_of(handoff_id, attempt)
            case _:
                return None

    def _suppress(self, command: Command, target: RequestId, result: CommandResult) -> tuple[CommandResult, bool]:
        """Drop what a settled step has ready for a cancelled request."""
        discard = isinstance(command, CancelRequest) and command.discard_pending_output
        if isinstance(result, Noop) and not discard:
            return result, False
        suppressed = self._retained.suppress(target)
        if not suppressed:
            return result, False
        self.counters.suppressed_outputs += 1
        if self._retained.withdraw_retirement(target):
            # The outside has not heard of it yet, and hears of it exactly once: now.
            self._retired.append(target)
        return Applied(), True

    def _start(self, request: Request, *, output_limit: int) -> Sequence:
        """Validate a request and put it in the waiting queue."""
        sequence = self._new_sequence(request, output_limit)
        self._own(sequence, "submitted")
        self.batcher.enqueue(sequence)
        return sequence

    def _new_sequence(self, request: Request, output_limit: int) -> Sequence:
        if request.request_id in self._sequences or self._retained.mentions(request.request_id):
            raise CommandRejected(f"request id {request.request_id} is already active on this node")
        sequence = Sequence(request, self._arrivals, output_limit, self.now)
        require_servable(sequence, self.kv, self.max_model_len)
        return sequence

    def _own(self, sequence: Sequence, what: str) -> None:
        self._arrivals += 1
        self._sequences[sequence.request_id] = sequence
        self._note(sequence, what)

    def _cancel_request(self, request_id: RequestId) -> CommandResult:
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.state not in SCHEDULED:
            return Noop()
        self._cancel_scheduled(sequence)
        return Applied()

    def _cancel_scheduled(self, sequence: Sequence) -> None:
        """Take a sequence out of the batcher and end it; its blocks stay until the step that uses them is settled."""
        removed = self.batcher.remove(sequence)
        self._note(sequence, "cancelled" if removed else "cancelled while a step of it runs")
        self._forget(sequence)
        self._retire(sequence)

    # The circle

    def advance_clock(self, now: float) -> None:
        """What begins from here on begins at `now`: after a step or a wait, a lease must not start in the past."""
        self.now = max(self.now, now)

    @door
    def boundary(self, now: float) -> BoundaryEffects:
        """The moment between two steps: time moves on to `now` (seconds, any origin), leases expire, one pending
        reservation is tried, and all that was kept back becomes visible.
        """
        self._require_between_steps()
        self.advance_clock(now)
        for handoff_id in self._leases.take_expired(self.now):
            self.counters.expired_leases += 1
            self._expire(handoff_id)
        self._retry_pending()
        retained = self._retained.release()
        events, self._events = (*retained.events, *self._events), []
        retired, self._retired = (*retained.retired, *self._retired), []
        return BoundaryEffects(self.kv.take_events(), retained.outputs, events, retired, self.incarnation)

    @property
    def next_deadline(self) -> float:
        """When `boundary` has something to do although nothing happens: the next lease's end; inf for never."""
        return self._leases.next_deadline

    @door
    def prepare(self) -> tuple[Effect, ...]:
        """Decide who runs in the next step. Returns what the device must do before it, each to be settled."""
        self._require_between_steps()
        self._require_released()
        return self.batcher.prepare(may_admit_fresh=self._may_admit())

    @door
    def effect_settled(self, effect: Effect, outcome: EffectOutcome | None) -> None:
        """The device answered an effect of `prepare`; outcome is None if it failed."""
        self.batcher.effect_settled(effect, outcome)

    @door
    def plan(self) -> StepPlan | None:
        """The next step to launch, or None when nothing can run until a command comes."""
        plan = self.batcher.plan()
        self._between_steps = plan is None
        return plan

    @door
    def plan_ahead(self) -> tuple[DecodeFed, tuple[Effect, ...]] | None:
        """The step after the one in flight, to be launched before that one is read, and what the device must be told
        before it; None where the next step has to wait. For a device of depth 2, right before its result is awaited.
        """
        self._require_released()
        self._between_steps = False
        return self.batcher.plan_ahead(may_admit_fresh=self._may_admit())

    def _may_admit(self) -> bool:
        return not self.is_admission_held and self._may_admit_fresh()

    @door
    def settle(self, result: StepResult) -> None:
        """Book the step that `plan` returned. What it brought becomes visible at the next `boundary`."""
        settled = self.batcher.settle(result)
        self._steps += 1
        self._between_steps = True
        for sequence in settled.first:
            self.counters.prompt_tokens += sequence.prompt_tokens
            self.counters.cached_tokens += sequence.cached
        self._keep_back(settled)

    @door
    def fail(self) -> None:
        """The step's device call failed: its sequences end with an error, their KV is not reused."""
        settled = self.batcher.abandon()
        self._steps += 1
        self._between_steps = True
        for sequence, _ in settled.left:
            settled.outputs.add(Output(sequence.request_id, sequence.outputs, None, FinishReason.ERROR))
        self._keep_back(settled)

    def _keep_back(self, settled: Settled) -> None:
        failed = FinishReason.ERROR
        for sequence in settled.doomed:
            del self._doomed[sequence]
            sequence.state = SequenceState.ENDED
            self.kv.release(sequence, keep=False)
        for sequence, finish in settled.left:
            if finish is not None:
                self._note(sequence, f"ended: {finish.value}")
            self._ended(sequence, finish, keep=finish is not failed)
        self._keep_back_events(settled.outputs)

    def _keep_back_events(self, outputs: Outputs | None = None) -> None:
        """What no command has caused is told at the next boundary."""
        self._retained.add(self._retained.outputs if outputs is None else outputs, self._events, self._retired)
        self._events, self._retired = [], []

    def _require_released(self) -> None:
        if not self._retained.is_empty:
            raise StepInFlight("what the last step brought is not released: call boundary first")

    @property
    def _is_mid_step(self) -> bool:
        """A step was launched and nothing was settled since."""
        return not self._between_steps and self.batcher.steps_in_flight > 0

    def _require_between_steps(self) -> None:
        if self._is_mid_step:
            raise StepInFlight("the step is not settled")
        if self.batcher.pressure.has_outstanding:
            raise StepInFlight("the device has not answered all effects")

    # Ownership

    def _retire(self, sequence: Sequence, *, keep: bool = True) -> None:
        """All ownership of this sequence ends here. keep: its partial tail may serve as prefix cache."""
        if self.batcher.is_in_flight(sequence):
            self.batcher.doom(sequence)
            self._doomed[sequence] = None
        else:
            sequence.state = SequenceState.ENDED
            self.kv.release(sequence, keep=keep)
        self._disown(sequence)

    def _disown(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request_id]
        self._stories.end(sequence.request_id)
        self._retired.append(sequence.request_id)

    def _note(self, sequence: Sequence, what: str) -> None:
        self._stories.note(sequence.request_id, self.now, self._steps, len(sequence.known), what)

    def story(self, request_id: RequestId) -> tuple[StoryLine, ...]:
        """What happened to a request here, oldest first; also of the last ones that ended."""
        return self._stories.of(request_id)

    def renew(self, handoff_id: HandoffId, attempt: int) -> bool:
        """Somebody follows this handoff: its lease runs anew. False if no lease of it runs here."""
        if handoff_id not in self._leases or self._request_of(handoff_id, attempt) is None:
            return False
        self._leases.renew(handoff_id, self.now)
        return True

    # What it looks like

    @door
    def check(self) -> None:
        """Prove that every block and every sequence is in exactly one place. Raises InvariantBroken."""
        try:
            prove(self.kv, self.batcher, self._sequences.values(), self._doomed)
        except InvariantBroken as error:
            lines = [f"{name}: {line}" for name in self._sequences for line in self.story(name)[-3:]]
            raise InvariantBroken("\n  ".join([str(error), *lines[-60:]])) from error

    @property
    def is_quiescent(self) -> bool:
        """Nothing of any request is on the device or in its spill store, and the device has been told so: its adapter
        table may change. Reached after a while of `is_admission_held`; who has nothing yet keeps waiting.
        """
        is_left_alone = not self._doomed and leaves_device_alone(self._sequences.values())
        return is_left_alone and not self.batcher.pressure.has_untold

    def set_adapters(self, digests: Mapping[str, str]) -> None:
        """The adapters that requests may name from now on, with the digests of their content."""
        self.kv.adapters = dict(digests)

    def count_adapter(self, name: str) -> int:
        """Requests here that name this adapter."""
        return sum(s.adapter == name for s in self._sequences.values())

    @property
    def is_drained(self) -> bool:
        """Nothing is owned: every block is free or cached."""
        return not self._sequences and not self._doomed

    def metrics(self) -> SchedulerMetrics:
        """A snapshot; walks over all sequences."""
        return measure(self.kv, self.batcher, self._parked(), sum(len(s.blocks) for s in self._doomed))

    def inventory(self) -> Inventory:
        """Every hold, reservation and active handoff, with ages."""
        holdings = self._holdings()
        owned = {holding.request_id for holding in holdings}
        return Inventory(self.incarnation, holdings, tuple(name for name in self._sequences if name not in owned))

    # What the two sides add

    @abstractmethod
    def _may_admit_fresh(self) -> bool:
        """Whether waiting sequences that need blocks may be admitted now."""

    @abstractmethod
    def _ended(self, sequence: Sequence, finish: FinishReason | None, *, keep: bool) -> None:
        """A sequence has left the batch: its request ended, or its output limit on this node is reached."""

    @abstractmethod
    def _forget(self, sequence: Sequence) -> None:
        """Drop the handoff that a sequence belongs to, if any."""

    @abstractmethod
    def _retry_pending(self) -> None:
        """Something may have become available: try the head of what waits for it, once."""

    @abstractmethod
    def _expire(self, handoff_id: HandoffId) -> None:
        """A lease is over: cancel what it covers."""

    @abstractmethod
    def _request_of(self, handoff_id: HandoffId, attempt: int) -> RequestId | None:
        """The request of a handoff that owns something here."""

    @abstractmethod
    def _parked(self) -> "dict[str, list[Sequence]]":
        """Sequences that are not the batcher's, by the name of what they are: held, pending, reserved, draining."""

    @abstractmethod
    def _holdings(self) -> tuple[Holding, ...]:
        """This side's handoffs, oldest first."""
