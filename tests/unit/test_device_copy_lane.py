"""Copies beside the steps: in order, waited for behind a fence only, and nobody hears when one fails."""

from collections.abc import Iterator
from threading import Event, Thread

import pytest
import torch

from device.copy_lane import CopyLane, open_copy_lane

WAIT_S = 10.0


@pytest.fixture
def lane() -> Iterator[CopyLane]:
    opened = open_copy_lane(torch.device("cpu"))
    yield opened
    opened.close()


class Step:
    """A step on its own thread; `begun` when the lane lets it."""

    def __init__(self, lane: CopyLane) -> None:
        self.begun = Event()
        self._lane = lane
        self._thread = Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self._lane.before_step()
        self.begun.set()

    def end(self) -> None:
        self._thread.join(WAIT_S)


def test_a_step_waits_behind_a_fence_only(lane: CopyLane) -> None:
    go = Event()
    lane.submit(lambda: go.wait(WAIT_S))
    free = Step(lane)
    assert free.begun.wait(WAIT_S)
    lane.fence()  # the host goes on at once
    held = Step(lane)
    assert not held.begun.wait(0.05)
    go.set()
    assert held.begun.wait(WAIT_S)
    for step in (free, held):
        step.end()


def test_copies_run_in_order_and_are_waited_for(lane: CopyLane) -> None:
    done: list[int] = []
    for number in range(50):
        lane.submit(lambda number=number: done.append(number))  # type: ignore[misc]
    lane.drain()
    assert done == list(range(50))
    lane.submit(lambda: done.append(50))
    lane.before_effect()
    assert done[-1] == 50


def test_a_copy_that_fails_holds_nobody_up(lane: CopyLane) -> None:
    def fail() -> None:
        raise OSError("gone")

    done: list[int] = []
    lane.submit(fail)
    lane.submit(lambda: done.append(1))
    lane.fence()
    lane.before_step()
    assert done == [1]


def test_without_copies_nothing_waits(lane: CopyLane) -> None:
    lane.fence()
    lane.before_step()
    lane.before_effect()
    lane.drain()


def test_closing_waits() -> None:
    lane, done = open_copy_lane(torch.device("cpu")), []
    lane.submit(lambda: done.append(1))
    lane.close()
    assert done == [1]
    with pytest.raises(RuntimeError):
        lane.submit(lambda: None)
