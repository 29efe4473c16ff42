"""The state machine that both schedulers share: every part of the circle is a rule, and all is compared with the model.

Each side adds its commands and transfer notes. A step's work on the device is done as late as possible, when it is
settled: a block that was given away too early is then overwritten under its new owner.
"""

import sys
from collections.abc import Collection, Sequence
from dataclasses import astuple
from typing import Any

import pytest
from commanded_machine import CommandedMachine
from determinism import steps_taken
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from kv_machine import KvMachine
from scheduler_checks import (
    KvListener,
    freeze,
    require_arrival_order,
    require_as_the_model,
    require_right_outputs,
    require_right_plan,
)
from scheduler_load import (
    BLOCK_SIZE,
    INCARNATION,
    MAX_MODEL_LEN,
    Act,
    Arrival,
    Setting,
    acts,
    arrivals,
    common_prefix,
    faults,
    moments,
    settings,
)
from scheduler_model import Running

from scheduler.commands import CancelRequest
from scheduler.contract import DeviceError, StepPlan
from scheduler.effects import Effect
from scheduler.errors import StepInFlight
from scheduler.ids import HandoffId, RequestId
from scheduler.policies import Preemption
from scheduler.request import Request

ROUNDS = 600
"""In which everything that is owned must end, with all transfers done at once and nothing cancelled."""


class SchedulerMachine(CommandedMachine):
    """prepared: nothing but `plan` is missing for the next step. history: tokens that were ever known, by adapter."""

    name: str

    @initialize(setting=settings)
    def start(self, setting: Setting) -> None:
        self.setting = setting
        options: dict[str, Any] = {
            "max_model_len": MAX_MODEL_LEN,
            "prefix_caching": setting.caching,
            "policy": setting.policy,
            "lease_s": setting.lease_s,
            "incarnation": INCARNATION,
            "kv_events": True,
        }
        self.build(setting, options)
        self.scheduler.set_adapters({"a": "content of a"})
        self.device = KvMachine(setting.blocks, BLOCK_SIZE, spill_blocks=setting.spill_blocks)
        self.clock = 0.0
        self.plan: StepPlan | None = None
        self.frozen: object = None
        self.prepared = self.disturbed = False
        self.history: list[tuple[str | None, tuple[int, ...]]] = []
        self.listener = KvListener()
        self.recent = [(HandoffId("h0"), 1)]

    def build(self, setting: Setting, options: dict[str, Any]) -> None:
        """Make the scheduler and its model."""
        raise NotImplementedError

    # The circle

    @precondition(lambda self: self.plan is None)
    @rule(passed=moments)
    def next_boundary(self, passed: float) -> None:
        self.boundary(passed)

    def boundary(self, passed: float) -> None:
        self.clock += passed
        effects = self.scheduler.boundary(self.clock)
        expected = self.model.boundary(self.clock)
        require_right_outputs(effects.outputs, expected.outputs)
        self.compare(effects.events, effects.retired, expected)
        self.listener.hear(effects.kv_events)
        assert effects.incarnation == INCARNATION

    @precondition(lambda self: self.plan is None and not self.has_kept)
    @rule(fails=faults)
    def prepare_a_step(self, fails: Collection[int]) -> None:
        self.prepare(fails)

    def prepare(self, fails: Collection[int]) -> None:
        paused = self.paused()
        effects = self.scheduler.prepare()
        self.device.fail_effects = {len(self.device.effects) + ordinal for ordinal in fails}
        if effects:
            self.model.asked = True
            self.nothing_else_may_come()
        outcomes = [self.perform(effect) for effect in effects]
        for effect, outcome in zip(effects, outcomes, strict=True):
            self.scheduler.effect_settled(effect, outcome)
        self.disturbed = None in outcomes
        self.model.asked = False
        self.device.fail_effects = set()
        self.prepared = True
        comes_back = [name not in self.paused() for name in self.model.owned if name in paused]
        assert comes_back == sorted(comes_back, reverse=True), "the oldest paused request comes back first"
        if not effects or not fails:
            assert self.scheduler.metrics().spilled == len(self.device.saved)

    def paused(self) -> set[RequestId]:
        """Preempted, and without blocks."""
        return {sequence.request_id for sequence in self.scheduler.batcher.pressure.sequences()}

    def perform(self, effect: Effect) -> Any:
        try:
            return self.device.apply(effect)
        except DeviceError:
            return None

    def nothing_else_may_come(self) -> None:
        for call in (lambda: self.scheduler.boundary(self.clock), self.scheduler.prepare, self.scheduler.plan):
            with pytest.raises(StepInFlight):
                call()
        self.apply(CancelRequest(RequestId("r0")))

    @property
    def has_kept(self) -> bool:
        kept = self.model.kept
        return bool(kept.outputs or kept.events or kept.retired)

    @precondition(lambda self: self.prepared)
    @rule()
    def launch(self) -> None:
        self.prepared = False
        self.plan = self.scheduler.plan()
        if self.plan is None:
            return
        self.check_plan(self.plan)
        self.frozen = freeze(self.plan)
        self.history += [(self.model.owned[r.request_id].request.adapter, tuple(r.known)) for r in self.plan.rows]
        self.model.launch([Running(self.model.owned[r.request_id], r.draw is not None) for r in self.plan.rows])

    def check_plan(self, plan: StepPlan) -> None:
        require_right_plan(plan, self.setting.limits, self.model)
        if self.setting.policy.queue == "fifo" and not self.disturbed:
            require_arrival_order(plan, self.model)

    @precondition(lambda self: self.plan is not None)
    @rule(passed=moments, failed=st.sampled_from([False] * 7 + [True]))
    def settle(self, passed: float, failed: bool) -> None:
        assert self.plan is not None
        assert freeze(self.plan) == self.frozen, "a row was changed while its step ran"
        self.clock += passed
        self.scheduler.advance_clock(self.clock)
        self.model.now = max(self.model.now, self.clock)
        self.device.fail_at = {self.device.steps} if failed else set()
        try:
            result = self.device.await_result(self.device.launch(self.plan))
        except DeviceError:
            self.scheduler.fail()
        else:
            self.scheduler.settle(result)
        self.plan = None
        self.model.settle(failed)

    @precondition(lambda self: self.plan is not None or self.has_kept)
    @rule()
    def out_of_turn(self) -> None:
        calls = [lambda: self.scheduler.boundary(self.clock), self.scheduler.plan] if self.plan is not None else []
        for call in [*calls, self.scheduler.prepare]:
            with pytest.raises(StepInFlight):
                call()

    # Several parts at once

    @rule(
        before=st.lists(arrivals, max_size=2),
        during=st.lists(acts | arrivals, max_size=3),
        after=st.lists(acts | arrivals, max_size=3),
        passed=moments,
        fails=faults,
        failed=st.sampled_from([False] * 15 + [True]),
        discards=st.sampled_from([False, False, True]),
    )
    def turn(
        self,
        before: Sequence[Arrival],
        during: Sequence[Act | Arrival],
        after: Sequence[Act | Arrival],
        passed: float,
        fails: Collection[int],
        failed: bool,
        discards: bool,
    ) -> None:
        """Once round the circle, with all sorts of things while the step runs and between it and its boundary."""
        self.complete()
        for arrival in before:
            self.do(arrival)
        self.prepare(fails)
        self.launch()
        for item in during:
            self.do(item)
        if self.plan is not None:
            self.settle(0.0, failed)
        if discards:
            self.discard_what_is_over()
        for item in after:
            self.do(item)
        self.boundary(passed)

    @rule(before=st.lists(arrivals, max_size=3), count=st.integers(2, 8), passed=moments, fails=faults)
    def turns(self, before: Sequence[Arrival], count: int, passed: float, fails: Collection[int]) -> None:
        """Several times round in peace."""
        self.complete()
        for arrival in before:
            self.do(arrival)
        for _ in range(count):
            self.cycle(passed / count, fails)

    def complete(self) -> None:
        """Settle what runs and let it be seen."""
        if self.plan is not None:
            self.settle(0.0, failed=False)
        self.boundary(0.0)

    def cycle(self, passed: float = 0.0, fails: Collection[int] = ()) -> None:
        self.prepare(fails)
        self.launch()
        if self.plan is None:
            self.require_that_nothing_fits()
        else:
            self.settle(0.0, failed=False)
        self.scheduler.check()
        self.boundary(passed)

    def require_that_nothing_fits(self) -> None:
        """No step although there is work: then it lacks blocks, or a place among this node's handoffs."""
        waiting = [owned.known for owned in self.model.owned.values() if self.could_run(owned.name)]
        assert not waiting or any(not self.fits(len(known)) for known in waiting), f"{waiting} could run"

    def could_run(self, name: RequestId) -> bool:
        return self.model.owned[name].phase in self.model.scheduled

    def fits(self, positions: int) -> bool:
        """Whether blocks are there even if nothing is cached. Under commitment all blocks are as good as promised."""
        kv = self.scheduler.kv
        if self.setting.policy.preemption is Preemption.NONE and kv.committed:
            return False
        return kv.blocks_for(positions) <= kv.pool.available

    @precondition(lambda self: len(self.model.owned) > 5)
    @rule()
    def everything_ends_if_transfers_do(self) -> None:
        self.finish()

    def finish(self) -> None:
        """Liveness: nothing is cancelled, nothing fails, and within bounds nothing is owned any more."""
        self.complete()
        for _ in range(ROUNDS):
            if not self.model.owned:
                return
            self.cooperate()
            self.cycle()
        raise AssertionError(f"after {ROUNDS} steps there are still {[astuple(o) for o in self.model.owned.values()]}")

    def cooperate(self) -> None:
        """Do what transfers and a coordinator do, as far as anything waits for it."""
        raise NotImplementedError

    def require_cached(self, request: Request, cached: int) -> None:
        """No more than what a request with the same adapter has ever had in common with this one."""
        longest = max(
            (common_prefix(known, request.prompt) for a, known in self.history if a == request.adapter), default=0
        )
        assert 0 <= cached <= longest
        assert self.setting.caching or not cached

    # What always holds

    @invariant()
    def it_is_as_the_model_says(self) -> None:
        steps_taken[self.name] += 1
        require_as_the_model(self.scheduler, self.model)
        assert self.setting.policy.preemption is not Preemption.NONE or not self.scheduler.metrics().preempted

    # The end

    def teardown(self) -> None:
        if not hasattr(self, "setting") or sys.exc_info()[0] is not None:
            return  # a rule has failed: that is what must be reported
        if self.setting.finishes:
            self.finish()
        else:
            self.cancel_everything()
        self.prepare(())
        scheduler = self.scheduler
        assert scheduler.plan() is None
        assert not self.model.owned
        assert not self.device.saved, "the spill store keeps something of requests that are gone"
        self.it_is_as_the_model_says()
        assert scheduler.is_drained
        assert scheduler.kv.pool.available == scheduler.kv.pool.total
        assert scheduler.kv.committed == 0
        assert len(self.listener.stored) <= scheduler.kv.pool.published

    def cancel_everything(self) -> None:
        for name in list(self.model.owned):
            self.apply(CancelRequest(name))
        self.complete()
        for _ in range(len(self.model.owned) + 1):
            self.cancel_handoffs()
            self.boundary(0.0)

    def cancel_handoffs(self) -> None:
        """End all that is held or reserved, and the transfers with it."""
        raise NotImplementedError
