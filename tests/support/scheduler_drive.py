"""Drives one scheduler without threads: steps on a device, commands by short names, ids by number."""

from collections import deque
from collections.abc import Iterable
from typing import Any, TypeVar

from kv_machine import KvMachine

from scheduler.base import SchedulerBase
from scheduler.batching import BatchLimits
from scheduler.contract import DecodeFed, DeviceError, DeviceIo, StepPlan
from scheduler.decode_scheduler import DecodeScheduler
from scheduler.effects import Effect, EffectOutcome, Ticket
from scheduler.events import BoundaryEffects, Outputs
from scheduler.ids import HandoffId, RequestId
from scheduler.prefill_scheduler import PrefillScheduler
from scheduler.request import FinishReason, Request

S = TypeVar("S", bound=SchedulerBase)

BLOCK_SIZE = 4
LIMITS = BatchLimits(max_tokens=16, max_sequences=4)


def request(name: str, prompt: Iterable[int], max_tokens: int = 4, **options: Any) -> Request:
    return Request(RequestId(name), tuple(prompt), max_tokens, **options)


def handoff(name: str) -> HandoffId:
    return HandoffId(name)


def prefill_scheduler(blocks: int = 16, **options: Any) -> PrefillScheduler:
    return _build(PrefillScheduler, blocks, options)


def decode_scheduler(blocks: int = 16, **options: Any) -> DecodeScheduler:
    return _build(DecodeScheduler, blocks, options)


def _build(kind: type[S], blocks: int, options: dict[str, Any]) -> S:
    settings: dict[str, Any] = {
        "block_size": BLOCK_SIZE,
        "limits": LIMITS,
        "max_model_len": 256,
        **options,
    }
    return kind(blocks, **settings)


class Stepper:
    """A scheduler and its device; remembers what came out. `check()` runs after every part of a boundary.

    depth: how many steps may be in flight. io: the device, instead of a KvMachine made with `device`.
    now: the clock; a step takes a second. in_flight: tickets of the launched steps, None for one whose launch failed.
    """

    def __init__(self, scheduler: SchedulerBase, depth: int = 1, io: DeviceIo | None = None, **device: Any) -> None:
        self.scheduler = scheduler
        self.depth = depth
        self.device: Any = io or KvMachine(scheduler.kv.pool.total, scheduler.kv.block_size, depth=depth, **device)
        self.tokens: dict[str, list[int]] = {}
        self.finishes: dict[str, FinishReason] = {}
        self.plans: list[str] = []
        self.effects: list[Effect] = []
        self.in_flight: deque[Ticket | None] = deque()
        self.now = 0.0

    def boundary(self) -> BoundaryEffects:
        """What is visible now."""
        effects = self.scheduler.boundary(self.now)
        self.scheduler.check()
        for output in effects.outputs:
            if output.token is not None:
                self.tokens.setdefault(output.request_id, []).append(output.token)
            if output.finish is not None:
                self.finishes[output.request_id] = output.finish
        return effects

    def launch(self) -> StepPlan | None:
        """Prepare and plan, without settling; None if nothing can run. What was not released before is lost."""
        for effect in self.scheduler.prepare():
            self.effects.append(effect)
            self.scheduler.effect_settled(effect, self._apply(effect))
        self.scheduler.check()
        plan = self.scheduler.plan()
        if plan is not None:
            self.plans.append(describe(plan))
        return plan

    def settle(self, plan: StepPlan) -> None:
        """Run the plan and book it; nothing of it is released yet."""
        self._start(plan)
        self._finish()

    def step(self) -> BoundaryEffects | None:
        """One step and the boundary after it; None if nothing can run. Anything that was pending is released first.

        At depth 2 the step after it is launched as well, where that may run ahead.
        """
        pending = self.boundary()
        if not self.in_flight:
            asked = len(self.effects)
            plan = self.launch()
            if plan is None and len(self.effects) > asked:
                plan = self.launch()  # what the device did may have made room
            if plan is None:
                return pending if not pending.is_empty else None
            self._start(plan)
        self._run_ahead()
        self._finish()
        effects = self.boundary()
        return BoundaryEffects(
            (*pending.kv_events, *effects.kv_events),
            Outputs.of((*pending.outputs, *effects.outputs)),
            (*pending.events, *effects.events),
            (*pending.retired, *effects.retired),
            effects.incarnation,
        )

    def _run_ahead(self) -> None:
        if self.depth < 2 or self.in_flight[0] is None:
            return
        ahead = self.scheduler.plan_ahead()
        self.scheduler.check()
        if ahead is None:
            return
        plan, effects = ahead
        self.plans.append(describe(plan))
        for effect in effects:
            self.effects.append(effect)
            assert self._apply(effect) is not None, f"{effect} failed"
        self._start(plan)

    def _apply(self, effect: Effect) -> EffectOutcome | None:
        try:
            outcome: EffectOutcome = self.device.apply(effect)
        except DeviceError:
            return None
        return outcome

    def _start(self, plan: StepPlan) -> None:
        try:
            self.in_flight.append(self.device.launch(plan))
        except DeviceError:
            self.in_flight.append(None)

    def _finish(self) -> None:
        """Book the oldest step that was launched."""
        self.now += 1
        self.scheduler.advance_clock(self.now)
        ticket = self.in_flight.popleft()
        try:
            result = None if ticket is None else self.device.await_result(ticket)
        except DeviceError:
            result = None
        if result is None:
            self.scheduler.fail()
        else:
            self.scheduler.settle(result)
        self.scheduler.check()

    def run(self, limit: int = 1000) -> list[BoundaryEffects]:
        """Step until nothing can run."""
        effects: list[BoundaryEffects] = []
        for _ in range(limit):
            done = self.step()
            if done is None:
                return effects
            effects.append(done)
        raise AssertionError(f"still running after {limit} steps")


def describe(plan: StepPlan) -> str:
    """The kind of a plan and its rows with their positions."""
    if isinstance(plan, DecodeFed):
        return f"decodefed {', '.join(f'{row.request_id}[{row.end}]' for row in plan.rows)}"
    rows = [f"{row.request_id}[{row.start}..{row.end - 1}]{'' if row.draw else ' no draw'}" for row in plan.rows]
    return f"{type(plan).__name__.lower()} {', '.join(rows)}"


def copy_blocks(
    source: KvMachine, source_blocks: Iterable[int], target: KvMachine, target_blocks: Iterable[int]
) -> None:
    """What a transfer does: the content of each source block into its target block."""
    size = source.facts().block_bytes
    for origin, goal in zip(source_blocks, target_blocks, strict=True):
        target.pool[goal * size : (goal + 1) * size] = source.pool[origin * size : (origin + 1) * size]
