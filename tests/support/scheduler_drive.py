"""Drives one scheduler without threads: steps on a device, commands by short names, ids by number."""

from collections.abc import Iterable
from typing import Any, TypeVar

from kv_machine import KvMachine

from scheduler.base import SchedulerBase
from scheduler.batching import BatchLimits
from scheduler.commands import BoundaryEffects
from scheduler.contract import DeviceError, StepPlan
from scheduler.decode_scheduler import DecodeScheduler
from scheduler.ids import HandoffId, RequestId
from scheduler.prefill_scheduler import PrefillScheduler
from scheduler.request import Request

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
    """A scheduler and its device; remembers what came out. `check()` runs after every step."""

    def __init__(self, scheduler: SchedulerBase, **device: Any) -> None:
        self.scheduler = scheduler
        self.device = KvMachine(scheduler.kv.pool.total, scheduler.kv.block_size, **device)
        self.tokens: dict[str, list[int]] = {}
        self.plans: list[StepPlan] = []

    def step(self) -> BoundaryEffects | None:
        """One step; None if nothing can run."""
        plan = self.scheduler.plan()
        if plan is None:
            return None
        self.plans.append(plan)
        try:
            effects = self.scheduler.complete(self.device.await_result(self.device.launch(plan)))
        except DeviceError:
            effects = self.scheduler.fail()
        self.scheduler.check()
        for output in effects.outputs:
            if output.token is not None:
                self.tokens.setdefault(output.request_id, []).append(output.token)
        return effects

    def run(self, limit: int = 1000) -> list[BoundaryEffects]:
        """Step until nothing can run."""
        effects: list[BoundaryEffects] = []
        for _ in range(limit):
            done = self.step()
            if done is None:
                return effects
            effects.append(done)
        raise AssertionError(f"still running after {limit} steps")


def copy_blocks(
    source: KvMachine, source_blocks: Iterable[int], target: KvMachine, target_blocks: Iterable[int]
) -> None:
    """What a transfer does: the content of each source block into its target block."""
    size = source.facts().block_bytes
    for origin, goal in zip(source_blocks, target_blocks, strict=True):
        target.pool[goal * size : (goal + 1) * size] = source.pool[origin * size : (origin + 1) * size]
