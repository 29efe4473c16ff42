from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from threading import Event, current_thread
from typing import Any

import pytest
from kv_machine import KvMachine, expected_output
from scheduler_drive import BLOCK_SIZE, prefill_scheduler, request

from handoff.step_loop import LoopStopped, StepLoop
from scheduler.commands import BoundaryEffects, Submit, Submitted
from scheduler.contract import Effect
from scheduler.errors import CommandRejected, InvariantBroken
from scheduler.ids import RequestId
from scheduler.request import FinishReason

WAIT_S = 10.0


class Running:
    """A step loop over a KvMachine, and what it observed."""

    def __init__(self, device: KvMachine | None = None) -> None:
        self.device = device or KvMachine(16, BLOCK_SIZE)
        self.scheduler = prefill_scheduler(16)
        self.boundaries: list[BoundaryEffects] = []
        self.idle = Event()
        self.loop = StepLoop(self.scheduler, self.device, self.observe, "test")
        self.on_observe: Any = None

    def observe(self, effects: BoundaryEffects) -> None:
        self.boundaries.append(effects)
        if self.on_observe is not None:
            self.on_observe(effects)
        if self.scheduler.is_drained:
            self.idle.set()

    def submit(self, name: str, *prompt: int, max_tokens: int = 3) -> "Future[Any]":
        self.idle.clear()
        return self.loop.call(lambda: self.scheduler.apply(Submit(request(name, prompt, max_tokens))))

    def tokens(self) -> list[int | None]:
        return [output.token for boundary in self.boundaries for output in boundary.outputs]


@pytest.fixture
def running() -> Iterator[Running]:
    running = Running()
    running.loop.start()
    yield running
    running.device.gate.release()
    if running.loop.failure is None:
        running.loop.stop(WAIT_S)


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
    future = running.loop.call(lambda: (running.scheduler.batcher.step_in_flight, current_thread().name))
    assert not future.done()
    running.device.gate.release()
    assert future.result(WAIT_S) == (False, "test-steps")


def test_calls_run_in_order(running: Running) -> None:
    order: list[int] = []
    futures = [running.loop.call(partial(order.append, i)) for i in range(50)]
    for future in futures:
        future.result(WAIT_S)
    assert order == list(range(50))


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
    assert running.device.is_torn_down
    assert running.loop.failure is None


def test_a_loop_that_never_started_can_be_stopped() -> None:
    Running().loop.stop(WAIT_S)


class SlowEnd(KvMachine):
    """Takes its time to quiesce, and then can't."""

    def __init__(self) -> None:
        super().__init__(16, BLOCK_SIZE)
        self.quiescing, self.go_on = Event(), Event()

    def apply(self, effect: Effect) -> None:
        self.quiescing.set()
        assert self.go_on.wait(WAIT_S)


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
    def apply(self, effect: Effect) -> None:
        raise RuntimeError("the device is gone")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_device_is_torn_down_even_if_it_cannot_quiesce() -> None:
    running = Running(BrokenEnd(16, BLOCK_SIZE))
    running.loop.start()
    running.loop.stop(WAIT_S)
    assert running.device.is_torn_down
