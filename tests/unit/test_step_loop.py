import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from threading import Event, current_thread
from typing import Any

import pytest
import structlog
from kv_machine import KvMachine, expected_output
from scheduler_drive import BLOCK_SIZE, decode_scheduler, handoff, prefill_scheduler, request

from handoff.step_loop import LoopStopped, StepLoop
from scheduler.base import SchedulerBase
from scheduler.commands import (
    Applied,
    CancelDestination,
    CancelRequest,
    Command,
    ReserveDestination,
    Submit,
    SubmitHandoffPrefill,
    Submitted,
)
from scheduler.contract import StepResult
from scheduler.effects import Done, Effect, EffectOutcome, Ticket
from scheduler.errors import CommandRejected, InvariantBroken
from scheduler.events import BoundaryEffects, LeaseExpired, LifecycleEvent, Output, SourceHeld
from scheduler.ids import RequestId
from scheduler.policies import Preemption, SchedulingPolicy
from scheduler.request import FinishReason

WAIT_S = 10.0


class Running:
    """A step loop over a KvMachine, and what it observed. boundaries: those at which something became visible."""

    def __init__(
        self,
        device: KvMachine | None = None,
        scheduler: SchedulerBase | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.device = device or KvMachine(16, BLOCK_SIZE)
        self.scheduler = scheduler or prefill_scheduler(16)
        self.boundaries: list[BoundaryEffects] = []
        self.idle = Event()
        self.loop = StepLoop(self.scheduler, self.device, self.observe, clock, "test")
        self.on_observe: Any = None

    def observe(self, effects: BoundaryEffects) -> None:
        if effects.is_empty:
            return
        self.boundaries.append(effects)
        if self.on_observe is not None:
            self.on_observe(effects)
        if self.scheduler.is_drained:
            self.idle.set()

    def apply(self, command: Command) -> "Future[Any]":
        self.idle.clear()
        return self.loop.call(lambda: self.scheduler.apply(command), command)

    def submit(self, name: str, *prompt: int, max_tokens: int = 3) -> "Future[Any]":
        return self.apply(Submit(request(name, prompt, max_tokens)))

    def outputs(self) -> list[Output]:
        return [output for boundary in self.boundaries for output in boundary.outputs]

    def events(self) -> list[LifecycleEvent]:
        return [event for boundary in self.boundaries for event in boundary.events]

    def tokens(self) -> list[int | None]:
        return [output.token for output in self.outputs()]


@contextmanager
def started(running: Running) -> Iterator[Running]:
    running.loop.start()
    yield running
    running.device.gate.release()
    if running.loop.failure is None:
        running.loop.stop(WAIT_S)


@pytest.fixture
def running() -> Iterator[Running]:
    with started(Running()) as running:
        yield running


def test_a_request_runs_to_its_end(running: Running) -> None:
    assert running.submit("a", 1, 2).result(WAIT_S).result == Submitted(RequestId("a"))
    assert running.idle.wait(WAIT_S)
    assert running.tokens() == expected_output([1, 2], 3)
    counters = running.loop.counters
    assert (counters.prefill_steps, counters.decode_steps) == (1, 2)
    assert (counters.computed_tokens, counters.sampled_tokens, counters.failed_steps) == (4, 3, 0)


def test_an_idle_loop_wakes_for_work_every_time(running: Running) -> None:
    for i in range(20):
        running.submit(f"r{i}", i + 1, max_tokens=1).result(WAIT_S)
        assert running.idle.wait(WAIT_S)
    assert len(running.boundaries) == 20


def test_work_runs_between_steps_on_the_loops_thread(running: Running) -> None:
    running.device.gate.hold()
    running.submit("a", 1)
    assert running.device.gate.wait_held(WAIT_S)
    future = running.loop.call(lambda: (running.scheduler.batcher.steps_in_flight > 0, current_thread().name))
    assert not future.done()
    running.device.gate.release()
    assert future.result(WAIT_S) == (False, "test-steps")


def test_calls_run_in_order(running: Running) -> None:
    order: list[int] = []
    futures = [running.loop.call(partial(order.append, i)) for i in range(50)]
    for future in futures:
        future.result(WAIT_S)
    assert order == list(range(50))


def test_a_cancel_goes_before_what_waits_longer_and_suppresses_what_is_settled(running: Running) -> None:
    running.device.gate.hold(after_steps=1)
    running.submit("a", 1, max_tokens=8)
    assert running.device.gate.wait_held(WAIT_S)
    order: list[str] = []
    first = running.loop.call(lambda: order.append(f"{running.scheduler.metrics().running} running"))
    cancel = running.apply(CancelRequest(RequestId("a")))
    running.device.gate.release()
    first.result(WAIT_S)
    effects = cancel.result(WAIT_S)
    assert (effects.result, effects.suppressed_pending_output) == (Applied(), True)
    assert order == ["0 running"]
    running.loop.call(lambda: None).result(WAIT_S)
    assert running.tokens() == expected_output([1], 1)


def test_what_becomes_visible_in_an_idle_loop_is_followed_by_another_look() -> None:
    """Each boundary lets one pending reservation through: none waits for the next command."""
    with started(Running(scheduler=decode_scheduler(16))) as running:
        for name, length in (("wide", 60), ("x", 2), ("y", 2), ("z", 2)):
            running.apply(ReserveDestination(handoff(name), request(name, range(length)))).result(WAIT_S)
        effects = running.apply(CancelDestination(handoff("wide"))).result(WAIT_S)
        assert [event.handoff_id for event in effects.events] == ["x"]
        deadline = time.monotonic() + WAIT_S
        while len(running.events()) < 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert [event.handoff_id for event in running.events()] == ["y", "z"]


def test_a_rejected_command_goes_to_its_caller_and_the_loop_goes_on(running: Running) -> None:
    with pytest.raises(CommandRejected):
        running.submit("a", *range(200)).result(WAIT_S)
    running.submit("a", 1).result(WAIT_S)
    assert running.idle.wait(WAIT_S)


def test_a_cancelled_call_is_not_run(running: Running) -> None:
    running.device.gate.hold()
    running.submit("a", 1)
    assert running.device.gate.wait_held(WAIT_S)
    ran = Event()
    assert running.loop.call(ran.set).cancel()
    running.device.gate.release()
    running.loop.call(lambda: None).result(WAIT_S)
    assert not ran.is_set()


def test_a_device_error_ends_the_rows_and_not_the_loop(running: Running) -> None:
    running.device.fail_at.add(1)
    running.submit("a", 1)
    assert running.idle.wait(WAIT_S)
    last = running.boundaries[-1].outputs[0]
    assert (last.index, last.token, last.finish) == (1, None, FinishReason.ERROR)
    assert running.loop.counters.failed_steps == 1
    running.submit("b", 5).result(WAIT_S)
    assert running.idle.wait(WAIT_S)
    assert running.tokens()[-3:] == expected_output([5], 3)


def test_a_failed_effect_is_logged_with_its_requests_and_the_request_goes_on() -> None:
    scheduler = prefill_scheduler(4, policy=SchedulingPolicy(preemption=Preemption.SPILL))
    running = Running(KvMachine(4, BLOCK_SIZE, fail_effects={0}), scheduler)
    with structlog.testing.capture_logs() as logs, started(running):
        futures = [running.submit(name, i, max_tokens=12) for i, name in enumerate("ab", 1)]
        assert [future.result(WAIT_S).result for future in futures] == [Submitted(RequestId(n)) for n in "ab"]
        assert running.idle.wait(WAIT_S)
        for i, name in enumerate("ab", 1):
            tokens = [output.token for output in running.outputs() if output.request_id == name]
            assert tokens == expected_output([i], 12)
    (failed,) = [line for line in logs if line["event"] == "effect failed"]
    assert failed["effect"] == "SaveSequenceState"
    assert failed["request_ids"] == ["b"]
    assert running.loop.counters.failed_effects == 1
    assert running.scheduler.batcher.pressure.counters.spill_failures == 1


def test_a_lease_ends_in_time_in_an_idle_loop() -> None:
    with started(Running(scheduler=prefill_scheduler(lease_s=0.05))) as running:
        running.apply(SubmitHandoffPrefill(handoff("x"), request("a", [1, 2]))).result(WAIT_S)
        assert running.idle.wait(WAIT_S)
        held, expired = running.events()
        assert (type(held), type(expired)) == (SourceHeld, LeaseExpired)
        assert running.boundaries[-1].retired == ("a",)


def test_a_lease_does_not_begin_before_its_step_ends() -> None:
    """A step that takes longer than a lease, and so does the wait before it."""
    now = [0.0]
    with started(Running(scheduler=prefill_scheduler(lease_s=5.0), clock=lambda: now[0])) as running:
        running.loop.call(lambda: None).result(WAIT_S)
        now[0] = 100.0
        running.device.gate.hold()
        running.apply(SubmitHandoffPrefill(handoff("x"), request("a", [1, 2])))
        assert running.device.gate.wait_held(WAIT_S)
        now[0] = 200.0
        running.device.gate.release()
        left = running.loop.call(lambda: running.scheduler.inventory().holdings[0].lease_left_s).result(WAIT_S)
        assert left == 5.0
        now[0] = 204.0
        assert running.loop.call(lambda: running.scheduler.renew(handoff("x"), 1)).result(WAIT_S)
        now[0] = 208.0
        running.loop.call(lambda: None).result(WAIT_S)
        now[0] = 209.0
        running.loop.call(lambda: None).result(WAIT_S)
        assert running.idle.wait(WAIT_S)
        assert [type(event) for event in running.events()] == [SourceHeld, LeaseExpired]


def broken() -> None:
    raise InvariantBroken("two owners")


def test_a_broken_invariant_stops_the_node(running: Running) -> None:
    with pytest.raises(InvariantBroken):
        running.loop.call(broken).result(WAIT_S)
    running.loop.stop(WAIT_S)
    assert isinstance(running.loop.failure, InvariantBroken)
    assert running.device.is_torn_down
    with pytest.raises(LoopStopped, match="failed: two owners"):
        running.submit("a", 1).result(WAIT_S)


class Silent(KvMachine):
    """Answers a step without its tokens."""

    def await_result(self, ticket: Ticket) -> StepResult:
        result = super().await_result(ticket)
        return StepResult(ticket, (None,) * len(result.tokens))


def test_the_log_of_a_failure_tells_the_requests_story() -> None:
    with structlog.testing.capture_logs() as logs, started(Running(Silent(16, BLOCK_SIZE))) as running:
        running.submit("a", 1, 2)
        running.loop.ended.result(WAIT_S)
    (failed,) = [line for line in logs if line["event"] == "step loop failed"]
    message, submitted, admitted = failed["reason"].split("\n")
    assert message == "a: a token without a draw, or a draw without a token"
    assert "submitted" in submitted
    assert "admitted" in admitted
    with pytest.raises(LoopStopped, match=r"a draw without a token$"):
        running.submit("b", 1).result(WAIT_S)


def test_an_observer_that_raises_stops_the_node(running: Running) -> None:
    called = Event()

    def refuse(effects: BoundaryEffects) -> None:
        called.set()
        raise RuntimeError("nobody listens")

    running.on_observe = refuse
    running.submit("a", 1)
    assert called.wait(WAIT_S)
    running.loop.stop(WAIT_S)
    assert "nobody listens" in str(running.loop.failure)
    assert running.device.is_torn_down


def test_stop_refuses_what_waits_and_what_comes() -> None:
    running = Running()
    running.loop.start()
    running.device.gate.hold()
    running.submit("a", 1)
    assert running.device.gate.wait_held(WAIT_S)
    with pytest.raises(TimeoutError, match="did not end within"):
        running.loop.stop(0.01)
    waiting = running.submit("b", 1)
    running.device.gate.release()
    running.loop.stop(WAIT_S)
    for future in (waiting, running.submit("c", 1)):
        with pytest.raises(LoopStopped, match="was stopped"):
            future.result(WAIT_S)
    assert running.tokens() == expected_output([1], 1), "what the last step brought was not released"
    assert running.device.is_torn_down
    assert running.loop.failure is None


def test_a_loop_that_never_started_can_be_stopped() -> None:
    Running().loop.stop(WAIT_S)


class SlowEnd(KvMachine):
    """Takes its time to quiesce, and then can't."""

    def __init__(self) -> None:
        super().__init__(16, BLOCK_SIZE)
        self.quiescing, self.go_on = Event(), Event()

    def apply(self, effect: Effect) -> EffectOutcome:
        self.quiescing.set()
        assert self.go_on.wait(WAIT_S)
        return Done()


def test_a_call_during_the_teardown_is_refused_and_not_forgotten() -> None:
    device = SlowEnd()
    running = Running(device)
    running.loop.start()
    with pytest.raises(TimeoutError):
        running.loop.stop(0.0)
    assert device.quiescing.wait(WAIT_S)
    with pytest.raises(LoopStopped):
        running.submit("late", 1).result(WAIT_S)
    device.go_on.set()
    running.loop.stop(WAIT_S)
    assert device.is_torn_down


class BrokenEnd(KvMachine):
    def apply(self, effect: Effect) -> EffectOutcome:
        raise RuntimeError("the device is gone")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_device_is_torn_down_even_if_it_cannot_quiesce() -> None:
    running = Running(BrokenEnd(16, BLOCK_SIZE))
    running.loop.start()
    running.loop.stop(WAIT_S)
    assert running.device.is_torn_down
