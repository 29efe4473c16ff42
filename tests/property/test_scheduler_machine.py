"""Both schedulers against a model of what the outside sees (scheduler_model.py, side_models.py).

Commands come in any order, with attempts and incarnations, in the middle of a step, and between a step and its
boundary. Pools are so small that preemption is the rule. The device turns every misplaced KV into a wrong token.
"""

from collections.abc import Sequence
from typing import Any

from determinism import deterministic
from hypothesis.stateful import invariant, rule
from scheduler_load import BLOCK_SIZE, INCARNATION, MAX_MODEL_LEN, Setting
from scheduler_machine import SchedulerMachine
from side_models import DestinationModel, SourceModel
from truth import kv_values, right_answer

from scheduler.commands import (
    ActivateDestination,
    CancelDestination,
    CancelSource,
    Command,
    ReleaseSource,
    ReserveDestination,
    SubmitHandoffPrefill,
)
from scheduler.contract import StepPlan
from scheduler.decode_scheduler import DecodeScheduler, ReservedKv
from scheduler.events import DestinationReserved, LifecycleEvent, SourceHeld
from scheduler.ids import HandoffId, RequestId
from scheduler.prefill_scheduler import PrefillScheduler
from scheduler.request import Request


class PrefillMachine(SchedulerMachine):
    """reading: blocks that the transport reads, and the tokens whose KV is in them, by handoff and attempt."""

    name = "prefill scheduler"
    scheduler: PrefillScheduler
    model: SourceModel

    def build(self, setting: Setting, options: dict[str, Any]) -> None:
        self.scheduler = PrefillScheduler(
            setting.blocks, BLOCK_SIZE, setting.limits, max_handoffs=setting.own_limit, **options
        )
        self.model = SourceModel(setting.blocks, BLOCK_SIZE, MAX_MODEL_LEN, setting.lease_s, INCARNATION)
        self.reading: dict[tuple[HandoffId, int], tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def begin_handoff(self, handoff: HandoffId, request: Request, attempt: int, armed: bool) -> None:
        self.apply(SubmitHandoffPrefill(handoff, request, attempt))

    def foreign(self, request: Request, handoff: HandoffId, attempt: int) -> Sequence[Command]:
        reserve = ReserveDestination(handoff, request, attempt)
        return reserve, ActivateDestination(handoff, attempt), CancelDestination(handoff, attempt)

    def proceed(self, pick: int, flag: bool) -> None:
        self.apply(ReleaseSource(*self.some_handoff(pick)))

    def cancel_handoff(self, pick: int, flag: bool) -> None:
        self.apply(CancelSource(*self.some_handoff(pick)))

    def start_transfer(self, pick: int, flag: bool) -> None:
        if self.plan is not None:
            return
        key = self.some_handoff(pick)
        held, owned = self.scheduler.held(*key), self.model.find(*key)
        assert (held is not None) == (owned is not None and owned.phase == "held")
        self.scheduler.transfer_started(*key)
        self.model.transfer_started(*key)
        if held is not None and owned is not None:
            prompt = owned.request.prompt
            assert (held.request_id, held.prompt_tokens) == (owned.name, len(prompt))
            assert held.first_token == right_answer(owned.request).tokens[0]
            assert len(held.blocks) == self.model.blocks_for(len(prompt))
            self.reading[key] = held.blocks, prompt

    def end_transfer(self, pick: int, success: bool) -> None:
        if self.plan is None:
            self.quiet(self.some_handoff(pick))

    def quiet(self, key: tuple[HandoffId, int]) -> None:
        self.reading.pop(key, None)
        self.scheduler.transfer_quiet(*key)
        self.model.transfer_quiet(*key)

    @invariant()
    def what_is_read_is_right(self) -> None:
        """As long as the transport may read, held or draining."""
        values = self.device.values
        for blocks, prompt in self.reading.values():
            assert tuple(values[list(blocks)].reshape(-1)[: len(prompt)]) == kv_values(prompt)

    def learn(self, event: LifecycleEvent) -> None:
        if isinstance(event, SourceHeld):
            self.require_cached(self.model.held[event.handoff_id, event.attempt], event.cached_tokens)

    def check_plan(self, plan: StepPlan) -> None:
        super().check_plan(plan)
        sources = [self.model.owned[row.request_id].phase for row in plan.rows].count("pending")
        assert sources + self.parked() <= self.setting.own_limit

    def parked(self) -> int:
        return sum(owned.phase in ("held", "draining") for owned in self.model.by_handoff.values())

    def could_run(self, name: RequestId) -> bool:
        if self.model.owned[name].phase == "pending" and self.parked() >= self.setting.own_limit:
            return False
        return super().could_run(name)

    def cooperate(self) -> None:
        for key, owned in [((handoff, o.attempt), o) for handoff, o in self.model.by_handoff.items()]:
            if owned.phase == "held":
                self.apply(ReleaseSource(*key))
            if owned.phase == "draining":
                self.quiet(key)
        self.boundary(0.0)

    def cancel_handoffs(self) -> None:
        for key in [(handoff, owned.attempt) for handoff, owned in self.model.by_handoff.items()]:
            self.apply(CancelSource(*key))
            self.quiet(key)


class DecodeMachine(SchedulerMachine):
    """receiving: reservations whose blocks the transport may write, and the request that they are for.

    armed: the last handoffs that activated themselves.
    """

    name = "decode scheduler"
    scheduler: DecodeScheduler
    model: DestinationModel

    def build(self, setting: Setting, options: dict[str, Any]) -> None:
        limit = setting.own_limit
        self.scheduler = DecodeScheduler(setting.blocks, BLOCK_SIZE, setting.limits, max_reservations=limit, **options)
        self.model = DestinationModel(setting.blocks, BLOCK_SIZE, MAX_MODEL_LEN, setting.lease_s, INCARNATION, limit)
        self.receiving: dict[tuple[HandoffId, int], tuple[ReservedKv, Request]] = {}
        self.armed: list[tuple[HandoffId, int]] = []

    def begin_handoff(self, handoff: HandoffId, request: Request, attempt: int, armed: bool) -> None:
        self.apply(ReserveDestination(handoff, request, attempt, armed))

    def foreign(self, request: Request, handoff: HandoffId, attempt: int) -> Sequence[Command]:
        prefill = SubmitHandoffPrefill(handoff, request, attempt)
        return prefill, ReleaseSource(handoff, attempt), CancelSource(handoff, attempt)

    def proceed(self, pick: int, flag: bool) -> None:
        self.apply(ActivateDestination(*self.some_destination(pick, flag)))

    def cancel_handoff(self, pick: int, flag: bool) -> None:
        self.apply(CancelDestination(*self.some_destination(pick, flag)))

    def some_destination(self, pick: int, flag: bool) -> tuple[HandoffId, int]:
        """Also one that once activated itself: it is acknowledged once, unless it is cancelled before."""
        return self.armed[pick % len(self.armed)] if flag and self.armed else self.some_handoff(pick)

    def learn(self, event: LifecycleEvent) -> None:
        if not isinstance(event, DestinationReserved):
            return
        owned = self.model.reserved(event.request_id)
        prompt, key = owned.request.prompt, (event.handoff_id, event.attempt)
        metrics = self.scheduler.metrics()
        assert not metrics.preempted + metrics.spilled, "a reservation went before a preempted request"
        reserved = self.scheduler.reserved(*key)
        assert reserved is not None
        assert (reserved.request_id, reserved.prompt_tokens) == (owned.name, len(prompt))
        assert len(reserved.blocks) == event.prompt_blocks == self.model.blocks_for(len(prompt))
        assert reserved.cached_blocks == event.prompt_blocks - event.missing_blocks
        cached = min(len(prompt), reserved.cached_blocks * BLOCK_SIZE)
        self.require_cached(owned.request, cached)
        assert self.content(reserved.blocks, cached) == kv_values(prompt)[:cached]
        self.receiving[key] = reserved, owned.request

    def content(self, blocks: tuple[int, ...], count: int) -> tuple[int, ...]:
        return tuple(self.values[list(blocks)].reshape(-1)[:count])

    @property
    def values(self) -> Any:
        return self.device.values

    # Transfers

    def start_transfer(self, pick: int, flag: bool) -> None:
        if self.plan is None:
            key = self.some_handoff(pick)
            self.scheduler.transfer_started(*key)
            self.model.transfer_started(*key)

    def end_transfer(self, pick: int, success: bool) -> None:
        if self.plan is None:
            (self.land_at if success else self.break_at)(self.some_handoff(pick))

    @rule()
    def bytes_come(self) -> None:
        """Parts of all transfers: whoever owns these blocks by mistake sees them written."""
        for key, (reserved, _) in self.receiving.items():
            owned = self.model.find(*key)
            if owned is not None and owned.moving:
                self.values[list(reserved.blocks[reserved.cached_blocks :])] = 0x77

    def land_at(self, key: tuple[HandoffId, int]) -> None:
        owned = self.model.find(*key)
        first = 0
        if owned is not None and owned.phase == "reserved":
            answer = right_answer(owned.request).tokens
            if key not in self.receiving or (len(answer) == 1 and owned.limit > 1):
                return  # it has come already, or its source ends it and nothing is sent
            first = answer[0]
            self.fill(*self.receiving[key])
            self.history.append((owned.request.adapter, owned.request.prompt))
        self.receiving.pop(key, None)
        assert self.scheduler.landed(*key, first) == self.model.landed(*key)
        if key in self.model.unacknowledged:
            self.armed = [*self.armed[-2:], key]

    def fill(self, reserved: ReservedKv, request: Request) -> None:
        right = kv_values(request.prompt)
        for position in range(reserved.cached_blocks * BLOCK_SIZE, len(right)):
            self.values[reserved.blocks[position // BLOCK_SIZE], position % BLOCK_SIZE] = right[position]

    def break_at(self, key: tuple[HandoffId, int]) -> None:
        self.scheduler.transfer_quiet(*key)
        self.model.transfer_quiet(*key)

    # Who waits for whom

    def prepare(self, fails: Any) -> None:
        """While a reservation waits, no submitted request gets its first blocks."""
        before = self.without_blocks()
        super().prepare(fails)
        assert not self.model.waiting or before <= self.without_blocks()

    def without_blocks(self) -> set[RequestId]:
        fresh = {owned.name for owned in self.model.owned.values() if owned.submitted and not owned.has_run}
        return fresh & {s.request_id for s in self.scheduler.batcher.waiting_sequences() if not s.blocks}

    def boundary(self, passed: float) -> None:
        """Each boundary tries the first of those that wait."""
        first = self.model.waiting[:1]
        super().boundary(passed)
        metrics = self.scheduler.metrics()
        if first != self.model.waiting[:1] or metrics.preempted + metrics.spilled:
            return
        for owned in first:
            positions = len(owned.request.prompt) + (owned.limit > 1)
            assert self.model.in_handoff == self.setting.own_limit or not self.fits(positions)

    def could_run(self, name: RequestId) -> bool:
        owned = self.model.owned[name]
        if owned.submitted and self.model.waiting and not owned.has_run:
            return False
        return super().could_run(name)

    def cooperate(self) -> None:
        for key, owned in [((handoff, o.attempt), o) for handoff, o in self.model.by_handoff.items()]:
            if owned.phase == "reserved" and len(right_answer(owned.request).tokens) > 1:
                self.land_at(key)
            if owned.phase == "landed":
                self.apply(ActivateDestination(*key))
            if owned.phase == "reserved":
                self.apply(CancelDestination(*key))
            if owned.phase == "draining":
                self.break_at(key)
        self.boundary(0.0)

    def cancel_handoffs(self) -> None:
        for key in [(handoff, owned.attempt) for handoff, owned in self.model.by_handoff.items()]:
            self.apply(CancelDestination(*key))
            self.break_at(key)


TestPrefillScheduler = PrefillMachine.TestCase
TestPrefillScheduler.settings = deterministic(max_examples=220, steps=50)
TestDecodeScheduler = DecodeMachine.TestCase
TestDecodeScheduler.settings = deterministic(max_examples=220, steps=50)
