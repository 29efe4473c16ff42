"""The order in which a step loop goes round, and that each step ends once: settled or failed, whatever fails.

Item 1 of the device contract's conformance checklist, on the loop that drives a node. Its SkipRest has no counterpart:
a turn has no lanes.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from loop_tape import LoopTape, TapedMachine, turns_of
from scheduler_drive import BLOCK_SIZE, decode_scheduler, request

from handoff.step_loop import StepLoop
from scheduler.commands import Submit
from scheduler.contract import StepResult
from scheduler.effects import Ticket
from scheduler.events import BoundaryEffects
from scheduler.policies import Preemption, SchedulingPolicy

WAIT_S = 10.0
REQUESTS = 9
STOPS = frozenset(range(0, 60, 7))


class Bench:
    """A loop over a machine with too few blocks for its requests. finishes: by request, how often it ended.

    observe: called at each boundary, on the loop's thread.
    """

    def __init__(self, depth: int, machine: type[TapedMachine] = TapedMachine, **faults: Any) -> None:
        self.tape = LoopTape()
        self.device = machine(self.tape, 12, BLOCK_SIZE, vocab_size=60, depth=depth, slots=3, **faults)
        policy = SchedulingPolicy(preemption=Preemption.SPILL)
        self.scheduler = decode_scheduler(12, policy=policy)
        self.tape.watch(self.scheduler)
        self.finishes: dict[str, int] = {}
        self.observe: Callable[[], None] = lambda: None
        self.loop = StepLoop(self.scheduler, self.device, self._observe, time.monotonic, "test")
        for i in range(REQUESTS):
            asked = request(f"r{i}", range(i, i + 6), 14, stop_token_ids=STOPS if i % 2 else frozenset())
            self.loop.call(lambda asked=asked: self.scheduler.apply(Submit(asked)))  # type: ignore[misc]

    def _observe(self, effects: BoundaryEffects) -> None:
        self.tape.marks += "O"
        for output in effects.outputs:
            if output.finish is not None:
                self.finishes[output.request_id] = self.finishes.get(output.request_id, 0) + 1
        self.observe()

    def run(self) -> None:
        """To the end of all requests, and then of the loop."""
        self.observe = self._stop_when_done
        self.loop.start()
        self.loop.ended.result(WAIT_S)
        self.loop.stop(WAIT_S)

    def _stop_when_done(self) -> None:
        if self.scheduler.is_drained:
            with suppress(RuntimeError):  # a thread does not wait for itself
                self.loop.stop(0)

    def require_each_step_ended_once(self) -> None:
        assert self.tape.awaited == [ticket for ticket in self.tape.launched if ticket is not None]
        assert len(self.tape.ended) == len(self.tape.launched)
        for launched, ended in zip(self.tape.launched, self.tape.ended, strict=True):
            assert ended is None or ended == launched
        assert self.finishes == dict.fromkeys((f"r{i}" for i in range(REQUESTS)), 1)


@pytest.fixture(params=[1, 2])
def depth(request: pytest.FixtureRequest) -> int:
    depth: int = request.param
    return depth


def test_the_loop_goes_round_in_one_order(depth: int) -> None:
    bench = Bench(depth)
    bench.run()
    bench.require_each_step_ended_once()
    turns = turns_of(bench.tape.marks)
    assert None not in bench.tape.ended
    assert any("Es" in turn for turn in turns), "no effect came before a step"
    assert any("A" in turn for turn in turns) == (depth == 2)
    assert any("P" not in turn for turn in turns if turn != "BO") == (depth == 2)
    assert bench.loop.failure is None


@pytest.mark.parametrize("first", range(0, 20, 2))
@pytest.mark.parametrize("faults", ["launch", "await", "launch await", "await launch", "await await", "launch launch"])
def test_a_step_that_fails_is_failed_once_and_the_others_are_settled(depth: int, faults: str, first: int) -> None:
    """Two in a row are, at depth 2, the one in flight and the one that runs ahead of it."""
    failing: dict[str, set[int]] = {"launch": set(), "await": set()}
    for ordinal, fault in enumerate(faults.split(), first):
        failing[fault].add(ordinal)
    bench = Bench(depth, fail_at=failing["launch"], fail_awaits=failing["await"])
    bench.run()
    bench.require_each_step_ended_once()
    turns_of(bench.tape.marks)
    failed = {number for number, ended in enumerate(bench.tape.ended) if ended is None}
    assert failed == failing["launch"] | failing["await"]
    assert bench.loop.counters.failed_steps == len(failed)
    assert bench.loop.failure is None


@pytest.fixture
def stopped_in_flight(depth: int) -> Iterator[Bench]:
    """Asked to stop while a step is launched; at depth 2 while another is in flight."""
    bench = Bench(depth)
    bench.device.gate.hold(after_steps=5)
    bench.loop.start()
    assert bench.device.gate.wait_held(WAIT_S)
    with pytest.raises(TimeoutError):
        bench.loop.stop(0)
    yield bench
    bench.device.gate.release()
    bench.loop.stop(WAIT_S)


def test_what_is_in_flight_at_a_stop_is_awaited_once_and_not_booked(depth: int, stopped_in_flight: Bench) -> None:
    bench = stopped_in_flight
    bench.device.gate.release()
    bench.loop.stop(WAIT_S)
    bench.loop.stop(WAIT_S)
    assert bench.tape.awaited == bench.tape.launched
    assert len(bench.tape.ended) == len(bench.tape.launched) - (depth == 2)
    assert None not in bench.tape.ended
    turns_of(bench.tape.marks)
    assert bench.tape.marks.endswith("BOWDQT" if depth == 2 else "BODQT")


def test_a_loop_that_fails_awaits_once_what_is_in_flight_and_ends_once(depth: int) -> None:
    bench = Bench(depth)

    def give_up() -> None:
        if len(bench.tape.ended) == 6:
            raise RuntimeError("nobody listens")

    bench.observe = give_up
    bench.loop.start()
    bench.loop.ended.result(WAIT_S)
    bench.loop.stop(WAIT_S)
    assert str(bench.loop.failure) == "nobody listens"
    assert bench.tape.awaited == bench.tape.launched
    assert len(bench.tape.ended) == 6
    assert bench.tape.marks.endswith("WDQT" if depth == 2 else "ODQT")


class Bug(TapedMachine):
    """Fails in a way that no device may."""

    def await_result(self, ticket: Ticket) -> StepResult:
        result = super().await_result(ticket)
        if ticket == 6:
            raise ZeroDivisionError("a bug in the router")
        return result


def test_a_step_that_ends_in_a_bug_is_not_awaited_again(depth: int) -> None:
    bench = Bench(depth, Bug)
    bench.loop.start()
    bench.loop.ended.result(WAIT_S)
    assert isinstance(bench.loop.failure, ZeroDivisionError)
    assert bench.tape.awaited == bench.tape.launched
    assert len(bench.tape.ended) == 6
    assert bench.tape.marks.count("T") == 1
