"""The step loop: one thread that joins a scheduler to a device.

    wait for work -> run what was asked for at this boundary -> plan -> launch -> settle -> publish the boundary

It never waits for the network: requests come in through `call`, effects go out through `observe`, and both return at
once. Everything that touches the scheduler runs on this thread.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeVar

import structlog

from scheduler.base import SchedulerBase
from scheduler.commands import BoundaryEffects
from scheduler.contract import Decode, DeviceError, DeviceIo, Quiesce, StepPlan
from scheduler.errors import InvariantBroken

log = structlog.get_logger()

T = TypeVar("T")

IDLE_WAIT_S = 60.0
"""How long an idle loop sleeps before it looks again; work wakes it at once."""


class LoopStopped(RuntimeError):
    """The step loop has ended; this node serves no more."""


@dataclass(slots=True)
class StepCounters:
    """Since the start of the loop."""

    prefill_steps: int = 0
    decode_steps: int = 0
    computed_tokens: int = 0
    sampled_tokens: int = 0
    failed_steps: int = 0


class StepLoop:
    """Owns the scheduler and the device. observe: called on the loop's thread after every step.

    ended: done when the loop is over; `failure` then says why, None for a stop that was asked for.
    """

    def __init__(
        self,
        scheduler: SchedulerBase,
        device: DeviceIo,
        observe: Callable[[BoundaryEffects], None],
        name: str,
    ) -> None:
        self._scheduler = scheduler
        self._device = device
        self._observe = observe
        self._inbox: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name=f"{name}-steps", daemon=True)
        self._stopping = False
        self._closed = False
        self._closing = Lock()
        self.failure: BaseException | None = None
        self.ended: Future[None] = Future()
        self.counters = StepCounters()

    def start(self) -> None:
        self._thread.start()

    def call(self, work: Callable[[], T]) -> "Future[T]":
        """Run `work` on the loop's thread at the next boundary. The future raises LoopStopped after the loop's end."""
        future: Future[T] = Future()
        with self._closing:
            if not self._closed:
                self._inbox.put((work, future))
                return future
        future.set_exception(self._stopped())
        return future

    def stop(self, timeout_s: float) -> None:
        """End after the running step, quiesce and tear down the device. Raises TimeoutError."""
        self._stopping = True
        self._inbox.put(None)
        if self._thread.ident is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the step loop did not end within {timeout_s} s")

    def _run(self) -> None:
        try:
            idle = False
            while not self._stopping:
                self._take_inbox(wait=idle)
                plan = self._scheduler.plan() if not self._stopping else None
                idle = plan is None
                if plan is not None:
                    self._step(plan)
        except BaseException as error:
            # A broken invariant must stop the node: serving on could hand one request another's blocks.
            log.exception("step loop failed")
            self.failure = error
            self._stopping = True
        finally:
            self._close()
            self._tear_down()
            self.ended.set_result(None)

    def _tear_down(self) -> None:
        """A device that can't quiesce or free its memory must not keep the node from ending."""
        try:
            self._device.apply(Quiesce())
        except Exception:
            log.exception("device could not quiesce")
        try:
            self._device.teardown()
        except Exception:
            log.exception("device could not be torn down")

    def _take_inbox(self, *, wait: bool) -> None:
        try:
            item = self._inbox.get(timeout=IDLE_WAIT_S) if wait else self._inbox.get_nowait()
            while True:
                if item is not None:
                    self._perform(*item)
                item = self._inbox.get_nowait()
        except Empty:
            return

    def _perform(self, work: Callable[[], Any], future: "Future[Any]") -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = work()
        except InvariantBroken as error:
            future.set_exception(error)
            raise
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    def _step(self, plan: StepPlan) -> None:
        try:
            result = self._device.await_result(self._device.launch(plan))
        except DeviceError as error:
            log.error("step failed", error=str(error), rows=[row.request_id for row in plan.rows])
            self.counters.failed_steps += 1
            self._observe(self._scheduler.fail())
            return
        self._count(plan)
        self._observe(self._scheduler.complete(result))

    def _count(self, plan: StepPlan) -> None:
        if isinstance(plan, Decode):
            self.counters.decode_steps += 1
        else:
            self.counters.prefill_steps += 1
        self.counters.computed_tokens += sum(len(row.tokens) for row in plan.rows)
        self.counters.sampled_tokens += sum(1 for row in plan.rows if row.draw is not None)

    def _stopped(self) -> LoopStopped:
        return LoopStopped(f"the step loop failed: {self.failure}" if self.failure else "the step loop was stopped")

    def _close(self) -> None:
        """Take no more calls, and refuse those that wait."""
        with self._closing:
            self._closed = True
        while not self._inbox.empty():
            item = self._inbox.get_nowait()
            if item is not None and item[1].set_running_or_notify_cancel():
                item[1].set_exception(self._stopped())
