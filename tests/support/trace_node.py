"""One node of a golden trace: a scheduler and its device, stepped by hand; what it does is written to `lines`."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import Any, TypeAlias

import trace_text
from kv_machine import KvMachine
from scheduler_drive import BLOCK_SIZE, describe

from scheduler.base import SchedulerBase
from scheduler.batching import BatchLimits
from scheduler.commands import Command, CommandEffects
from scheduler.contract import DeviceError, StepPlan
from scheduler.decode_scheduler import DecodeScheduler
from scheduler.effects import Ticket
from scheduler.errors import StepInFlight
from scheduler.events import BoundaryEffects
from scheduler.ids import RequestId
from scheduler.policies import Preemption, SchedulingPolicy
from scheduler.prefill_scheduler import PrefillScheduler

Work: TypeAlias = Callable[[], None]

PRESSURE = ("preempted", "resumed")
"""How the lines of a story begin that a trace shows when they are written."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The options of the directive `nodes`; both nodes have them."""

    prefill_blocks: int = 16
    decode_blocks: int = 16
    tokens: int = 8
    sequences: int = 4
    max_handoffs: int = 256
    max_reservations: int = 32
    queue: str = "fifo"
    preemption: str = "recompute"
    victim: str = "last"
    priority_ageing: float = 10.0
    prefill_ageing: float = 100.0
    immunity: int = 16
    headroom: int = 0
    spill_blocks: int = 64
    lease: float = inf
    kv_events: str = "no"

    @classmethod
    def parse(cls, options: dict[str, str]) -> "Setup":
        default = cls()
        values: dict[str, Any] = {name: type(getattr(default, name))(text) for name, text in options.items()}
        return cls(**values)

    def prefill(self) -> PrefillScheduler:
        return PrefillScheduler(
            self.prefill_blocks, BLOCK_SIZE, self._limits, max_handoffs=self.max_handoffs, **self._common
        )

    def decode(self) -> DecodeScheduler:
        return DecodeScheduler(
            self.decode_blocks, BLOCK_SIZE, self._limits, max_reservations=self.max_reservations, **self._common
        )

    @property
    def _limits(self) -> BatchLimits:
        return BatchLimits(self.tokens, self.sequences)

    @property
    def _common(self) -> dict[str, Any]:
        policy = SchedulingPolicy(
            queue=self.queue,
            preemption=Preemption(self.preemption),
            victim=self.victim,
            priority_ageing_s=self.priority_ageing,
            prefill_ageing_tokens_per_s=self.prefill_ageing,
            immunity_tokens=self.immunity,
            headroom_blocks=self.headroom,
        )
        return {
            "max_model_len": 64,
            "policy": policy,
            "lease_s": self.lease,
            "kv_events": self.kv_events == "yes",
        }


class TraceNode:
    """`check()` runs after every part. What can't be done while a step runs waits for its settlement, in order."""

    def __init__(self, name: str, scheduler: SchedulerBase, spill_blocks: int, lines: list[str]) -> None:
        self.name = name
        self.scheduler = scheduler
        self.device = KvMachine(scheduler.kv.pool.total, BLOCK_SIZE, spill_blocks=spill_blocks)
        self.lines = lines
        self._told: dict[RequestId, int] = {}
        self._plan: StepPlan | None = None
        self._ticket: Ticket | None = None
        self._waiting: list[Work] = []

    @property
    def in_step(self) -> bool:
        return self._plan is not None

    def apply(self, command: Command, incarnation: int | None = None) -> CommandEffects:
        """Raises CommandRejected or StepInFlight, and has changed nothing then."""
        try:
            return self.scheduler.apply(command, incarnation)
        finally:
            self.scheduler.check()

    def when_settled(self, work: Work) -> None:
        """What is to be done right after the running step is settled."""
        self._waiting.append(work)

    def boundary(self, now: float) -> BoundaryEffects:
        """Raises StepInFlight."""
        effects = self.scheduler.boundary(now)
        self.scheduler.check()
        return effects

    def launch(self, names: Iterable[RequestId]) -> bool:
        """Prepare and launch a step; False if nothing can run. names: whose preemptions are told."""
        if self.in_step:
            raise StepInFlight(f"{self.name} runs a step")
        effects = self.scheduler.prepare()
        for name in names:
            self._tell_pressure(name)
        for effect in effects:
            try:
                outcome = self.device.apply(effect)
            except DeviceError:
                outcome = None
            self.lines.append(f"{self.name} {trace_text.effect(effect, outcome)}")
            self.scheduler.effect_settled(effect, outcome)
        self.scheduler.check()
        self._plan = self.scheduler.plan()
        if self._plan is None:
            return False
        self.lines.append(f"{self.name} {describe(self._plan)}")
        try:
            self._ticket = self.device.launch(self._plan)
        except DeviceError:
            self._ticket = None
        return True

    def _tell_pressure(self, name: RequestId) -> None:
        story = self.scheduler.story(name)
        for line in story[self._told.get(name, 0) :]:
            if line.what.startswith(PRESSURE):
                self.lines.append(f"{self.name} {name} is {line.what}")
        self._told[name] = len(story)

    def settle(self) -> None:
        """Book the running step and do what waited for it; nothing becomes visible yet."""
        assert self._plan is not None, f"{self.name} runs no step"
        self._plan = None
        if self._ticket is None:
            self.scheduler.fail()
        else:
            self.scheduler.settle(self.device.await_result(self._ticket))
        self.scheduler.check()
        waiting, self._waiting = self._waiting, []
        for work in waiting:
            work()
