"""The two sides of a handoff in tests: real KV from a prefill node, proofs that a scheduler is unchanged or empty."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from kv_machine import KvMachine
from scheduler_drive import Stepper, copy_blocks, decode_scheduler, handoff, prefill_scheduler, request

from scheduler.base import SchedulerBase
from scheduler.commands import (
    ActivateDestination,
    Applied,
    CancelDestination,
    CancelRequest,
    CancelSource,
    Command,
    CommandEffects,
    ReserveDestination,
    SubmitHandoffPrefill,
)
from scheduler.contract import StepPlan
from scheduler.decode_scheduler import DecodeScheduler
from scheduler.errors import CommandRejected, SchedulerError
from scheduler.events import DestinationReserved, LifecycleEvent
from scheduler.ids import HandoffId
from scheduler.inventory import Holding
from scheduler.prefill_scheduler import HeldKv, PrefillScheduler
from scheduler.request import Request

DEVICE_OPTIONS = ("fail_at", "fail_effects", "spill_blocks")


class SourceNode(Stepper):
    """A prefill scheduler on its device. options: those of the scheduler, and of the device."""

    scheduler: PrefillScheduler

    def __init__(self, blocks: int = 16, **options: Any) -> None:
        device = {name: options.pop(name) for name in DEVICE_OPTIONS if name in options}
        super().__init__(prefill_scheduler(blocks, **options), **device)

    def submit(self, name: str, prompt: Iterable[int], max_tokens: int = 4, **options: Any) -> CommandEffects:
        """Handoff and request have the same name."""
        asked = request(name, prompt, max_tokens, **options)
        return self.scheduler.apply(SubmitHandoffPrefill(handoff(name), asked))

    def hold(self, name: str, prompt: Iterable[int], max_tokens: int = 4) -> None:
        """Prefill until it is held."""
        self.submit(name, prompt, max_tokens)
        self.run()
        assert self.scheduler.held(handoff(name), 1) is not None


class DestinationNode(Stepper):
    """A decode scheduler on its device. options: those of the scheduler, and of the device."""

    scheduler: DecodeScheduler

    def __init__(self, blocks: int = 16, **options: Any) -> None:
        device = {name: options.pop(name) for name in DEVICE_OPTIONS if name in options}
        super().__init__(decode_scheduler(blocks, **options), **device)

    def reserve(
        self, name: str, prompt: Iterable[int], max_tokens: int = 4, *, armed: bool = False, **options: Any
    ) -> list[HandoffId]:
        """Handoff and request have the same name. Returns the handoffs that became reserved by it."""
        asked = request(name, prompt, max_tokens, **options)
        return reserved_in(self.scheduler.apply(ReserveDestination(handoff(name), asked, 1, armed)).events)

    def land(self, name: str, prompt: Iterable[int]) -> bool:
        """What a transfer does: the KV of the prompt, computed elsewhere, comes into the reserved blocks."""
        reserved = self.scheduler.reserved(handoff(name), 1)
        assert reserved is not None, f"{name} is not reserved"
        device, held = computed_elsewhere(tuple(prompt))
        first = reserved.cached_blocks
        copy_blocks(device, held.blocks[first:], self.device, reserved.blocks[first:])
        return self.scheduler.landed(handoff(name), 1, held.first_token)

    def serve(self, name: str, prompt: Iterable[int], max_tokens: int = 4, **options: Any) -> None:
        """Reserve, land and activate; it runs with the next step."""
        prompt = tuple(prompt)
        self.reserve(name, prompt, max_tokens, **options)
        assert self.land(name, prompt)
        assert self.scheduler.apply(ActivateDestination(handoff(name))).result == Applied()

    def serve_all(self, requests: Iterable[Request], limit: int = 5000) -> None:
        """Serve many handoffs at once, each armed, its bytes a step behind its reservation, until nothing can run."""
        prompts: dict[str, tuple[int, ...]] = {}
        coming: list[HandoffId] = []
        for asked in requests:
            prompts[asked.request_id] = asked.prompt
            command = ReserveDestination(HandoffId(asked.request_id), asked, activate_when_landed=True)
            coming += reserved_in(self.scheduler.apply(command).events)
        for _ in range(limit):
            landing, coming = coming, []
            for handoff_id in landing:
                assert self.land(handoff_id, prompts[handoff_id])
            done = self.step()
            if done is not None:
                coming = reserved_in(done.events)
            elif not landing:
                return
        raise AssertionError(f"still running after {limit} steps")


@cache
def computed_elsewhere(prompt: tuple[int, ...]) -> tuple[KvMachine, HeldKv]:
    """What a prefill node holds of `prompt`, and the device that has it. Read only: it is computed once for all."""
    node = SourceNode(64)
    node.hold("source", prompt)
    held = node.scheduler.held(handoff("source"), 1)
    assert held is not None
    return node.device, held


def launch_step(stepper: Stepper) -> StepPlan:
    """Release what was pending and launch a step that is not settled."""
    stepper.boundary()
    plan = stepper.launch()
    assert plan is not None, "nothing can run"
    return plan


def settle_step(stepper: Stepper) -> None:
    """A whole step, of which nothing is released yet."""
    stepper.settle(launch_step(stepper))


def reserved_in(events: Iterable[LifecycleEvent]) -> list[HandoffId]:
    return [event.handoff_id for event in events if isinstance(event, DestinationReserved)]


def holding(scheduler: SchedulerBase, name: str) -> Holding | None:
    """What the inventory says of a handoff; None if nothing is owned for it."""
    found = [item for item in scheduler.inventory().holdings if item.handoff_id == name]
    return found[0] if found else None


def phase_of(scheduler: SchedulerBase, name: str) -> str | None:
    found = holding(scheduler, name)
    return None if found is None else found.phase


def snapshot(scheduler: SchedulerBase) -> tuple[object, ...]:
    """All that shows of a scheduler from outside. Its accounting must hold."""
    scheduler.check()
    return (
        scheduler.inventory(),
        scheduler.metrics(),
        replace(scheduler.counters),
        replace(scheduler.batcher.pressure.counters),
        scheduler.next_deadline,
        scheduler.is_drained,
        scheduler.kv.pool.generation,
    )


def refuse(
    scheduler: SchedulerBase,
    command: Command,
    error: type[SchedulerError] = CommandRejected,
    match: str | None = None,
    incarnation: int | None = None,
) -> None:
    """The command must raise, and leave everything as it was."""
    before = snapshot(scheduler)
    with pytest.raises(error, match=match):
        scheduler.apply(command, incarnation)
    assert snapshot(scheduler) == before


def wind_down(stepper: Stepper) -> None:
    """Cancel everything: nothing may be owned then, no block lost and no state left in the spill store."""
    scheduler = stepper.scheduler
    for item in scheduler.inventory().holdings:
        command = CancelSource if isinstance(scheduler, PrefillScheduler) else CancelDestination
        scheduler.apply(command(item.handoff_id, item.attempt))
        assert isinstance(scheduler, PrefillScheduler | DecodeScheduler)
        scheduler.transfer_quiet(item.handoff_id, item.attempt)
    for name in scheduler.inventory().local:
        scheduler.apply(CancelRequest(name))
    stepper.run()
    assert scheduler.is_drained
    metrics = scheduler.metrics()
    assert metrics.free + metrics.cached == metrics.total
    assert not stepper.device.saved
