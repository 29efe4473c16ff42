"""Where launched steps wait and run, one after another: the part of an asynchronous router that a device differs in.

Each step leaves its drawn ids in cells on the device, from which the next one may be fed before the host has read them.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import get_native_id
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from device.copy_lane import CopyLane
from device.model_runner import ModelRunner, StepInput
from scheduler.contract import DeviceError, Fault

GIVES_WAY = 10
LOWEST_PRIORITY = 19
"""Niceness, as Linux counts it."""
READBACK_SLOTS = 3
"""Two steps may be in flight while a third is being read."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outcome:
    """tokens: by row. logits: [rows with a draw, vocabulary], on the device."""

    tokens: tuple[int | None, ...]
    logits: Tensor


class Issued(Protocol):
    """A step that was issued and not read."""

    def wait(self) -> Outcome:
        """The step's outcome, once. Raises DeviceError(FORWARD | READBACK). Its readback slot is free after it."""
        ...


class StepQueue(Protocol):
    """Used by the thread that drives the router."""

    def issue(self, step: StepInput, fed: Sequence[int] | None) -> Issued:
        """Run `step` after all that was issued. The host does not wait.

        fed: by row, whose id of the step issued last it computes, as a number among that step's draws; None for a step
        that is not fed. Raises DeviceError(FORWARD) when nothing was issued, as with all readback slots taken.
        """
        ...

    def run(self, work: Callable[[], object]) -> None:
        """Do `work`, which must not raise, after all that was issued. The host does not wait."""
        ...

    def drain(self) -> None:
        """The host waits for all that was issued."""
        ...

    def close(self) -> None:
        """Drain; nothing may be issued any more."""
        ...


class ReadbackRing(Generic[T]):
    """A fixed number of places for results on their way to the host."""

    def __init__(self, places: Sequence[T]) -> None:
        self._free = list(places)
        self._total = len(places)

    def take(self) -> T:
        """Raises DeviceError(FORWARD) when none is free."""
        if not self._free:
            raise DeviceError(Fault.FORWARD, f"{self._total} steps are launched and not read: await one first")
        return self._free.pop(0)

    def give_back(self, place: T) -> None:
        self._free.append(place)


def _give_way() -> None:
    """The threads that pass on what was computed go first: each works for microseconds, and a handoff waits for it."""
    own = os.getpriority(os.PRIO_PROCESS, get_native_id())
    os.setpriority(os.PRIO_PROCESS, get_native_id(), min(LOWEST_PRIORITY, own + GIVES_WAY))


class ThreadQueue:
    """The queue of a device that computes where it is called, a CPU: one thread, which starts with the first step."""

    def __init__(self, runner: ModelRunner, lane: CopyLane) -> None:
        self._runner = runner
        self._lane = lane
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="device", initializer=_give_way)
        self._ring = ReadbackRing(range(READBACK_SLOTS))
        self._cells: Tensor | None = None
        """Touched by steps only, so by the thread only."""

    def issue(self, step: StepInput, fed: Sequence[int] | None) -> Issued:
        place = self._ring.take()
        return _OnThread(self._thread.submit(self._run, step, fed), lambda: self._ring.give_back(place))

    def run(self, work: Callable[[], object]) -> None:
        self._thread.submit(work)

    def drain(self) -> None:
        self._thread.submit(int).result()

    def close(self) -> None:
        self._thread.shutdown()

    def _run(self, step: StepInput, fed: Sequence[int] | None) -> Outcome:
        cells, self._cells = self._cells, None
        self._lane.before_step()
        if fed is not None:
            if cells is None:
                raise DeviceError(Fault.FORWARD, "the step that was to feed it failed")
            self._runner.feed(step, cells, torch.tensor(fed))
        logits = self._runner.forward(step)
        ids = self._runner.draw(step, logits)
        tokens = self._runner.read(step, ids.tolist())
        self._cells = ids
        return Outcome(tokens, logits)


@dataclass(frozen=True, slots=True)
class _OnThread:
    """See Issued."""

    future: "Future[Outcome]"
    free: Callable[[], None]

    def wait(self) -> Outcome:
        try:
            return self.future.result()
        finally:
            self.free()
