"""The step loop: one thread that joins a scheduler to a device.

    inbox --> boundary --> observe --> effects --> plan --> launch --> launch ahead --> await --> settle | fail
      ^                                              |                                                     |
      `-----nothing to run: wait for work, a lease---'-----------------------------------------------------'

With a device of depth 2 the step after this one may be in flight already when this one is read; the circle goes round
without the parts between observe and launch then.

It never waits for the network: requests come in through `call`, what becomes visible goes out through `observe`, and
both return at once. Everything that touches the scheduler runs on this thread.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import TypeVar

import structlog

from handoff.inbox import Call, boundary_order
from scheduler.base import SchedulerBase
from scheduler.commands import Command
from scheduler.contract import DecodeFed, DeviceError, DeviceIo, LayerWatch, Prefill, StepPlan, StepResult
from scheduler.effects import CopyBlocks, Effect, EffectOutcome, Ticket
from scheduler.errors import InvariantBroken
from scheduler.events import BoundaryEffects
from scheduler.ids import RequestId
from scheduler.shutdown import shut_down

log = structlog.get_logger()

T = TypeVar("T")

IDLE_WAIT_S = 60.0
"""How long an idle loop sleeps before it looks again; work wakes it at once, and the end of a lease in time."""


class LoopStopped(RuntimeError):
    """The step loop has ended; this node serves no more."""


def first_line(error: BaseException) -> str:
    """An error in one line; a broken invariant has its request's story under it."""
    return (str(error) or type(error).__name__).partition("\n")[0]


class Flight:
    """A launched step. What is counted of it is noted now: rows move on when it is settled."""

    def __init__(self, plan: StepPlan) -> None:
        self.request_ids = [row.request_id for row in plan.rows]
        self.is_prefill = isinstance(plan, Prefill)
        self.is_fed = isinstance(plan, DecodeFed)
        self.computed_tokens = sum(row.count for row in plan.rows) if self.is_prefill else len(plan.rows)
        self.ticket: Ticket | None = None
        self.failure: DeviceError | None = None


@dataclass(slots=True)
class StepCounters:
    """Since the start of the loop. fed_steps: decode steps that were launched before the last one was read."""

    prefill_steps: int = 0
    decode_steps: int = 0
    fed_steps: int = 0
    computed_tokens: int = 0
    sampled_tokens: int = 0
    failed_steps: int = 0
    failed_effects: int = 0

    def count(self, flight: Flight, result: StepResult) -> None:
        self.prefill_steps += flight.is_prefill
        self.decode_steps += not flight.is_prefill
        self.fed_steps += flight.is_fed
        self.computed_tokens += flight.computed_tokens
        self.sampled_tokens += len(result.tokens) - result.tokens.count(None)


class StepLoop:
    """Owns the scheduler and the device.

    observe: called on the loop's thread at every boundary, with what becomes visible there. tell: after it; on a device
    that computes beside us only when the next steps are launched, so that what others are told costs it no time.
    on_launch: with the requests of each step that was launched. watch: asked before each prefill step who watches it.
    clock: seconds, monotonic. settled_at: when the last step was read.
    ended: done when the loop is over; `failure` then says why, None for a stop that was asked for.
    """

    def __init__(
        self,
        scheduler: SchedulerBase,
        device: DeviceIo,
        observe: Callable[[BoundaryEffects], None],
        clock: Callable[[], float],
        name: str,
        on_launch: Callable[[Sequence[RequestId]], None] = lambda request_ids: None,
        tell: Callable[[], None] = lambda: None,
        watch: Callable[[Prefill], LayerWatch | None] = lambda plan: None,
    ) -> None:
        self._tell = tell
        self._on_launch = on_launch
        self._watch = watch
        self.settled_at = 0.0
        self._scheduler = scheduler
        self._device = device
        self._observe = observe
        self._clock = clock
        self._inbox: SimpleQueue[Call | None] = SimpleQueue()
        self._due: deque[Call] = deque()
        self._flights: deque[Flight] = deque()
        self._depth = device.max_depth()
        self._thread = Thread(target=self._run, name=f"{name}-steps", daemon=True)
        self._stopping = False
        self._closed = False
        self._closing = Lock()
        self.failure: BaseException | None = None
        self.ended: Future[None] = Future()
        self.counters = StepCounters()

    def start(self) -> None:
        self._thread.start()

    def call(self, work: Callable[[], T], command: Command | None = None) -> "Future[T]":
        """Run `work` on the loop's thread at the next boundary. The future raises LoopStopped after the loop's end.

        command: what it applies, for the order among all that waits for the boundary.
        """
        future: Future[T] = Future()
        with self._closing:
            if not self._closed:
                self._inbox.put(Call(work, future, command))
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
            while True:
                if not self._stopping:
                    self._take_inbox(wait=idle)
                visible = self._scheduler.boundary(self._clock())
                self._observe(visible)
                if self._stopping:
                    break
                idle = not self._advance() and visible.is_empty
        except BaseException as error:
            # A broken invariant must stop the node: serving on could hand one request another's blocks.
            log.exception("step loop failed", reason=str(error))
            self.failure = error
            self._stopping = True
        finally:
            self._close()
            self._tell()
            self._tear_down()
            self.ended.set_result(None)

    def _tear_down(self) -> None:
        """A device that can't end quietly or free its memory must not keep the node from ending."""

        def report(what: str, error: Exception) -> None:
            log.error("device could not end quietly", part=what, reason=str(error))

        tickets = [flight.ticket for flight in self._flights if flight.ticket is not None]
        self._flights.clear()
        shut_down(self._device, report, tickets)

    def _take_inbox(self, *, wait: bool) -> None:
        """Do all that waits. What comes meanwhile waits for the next boundary."""
        try:
            item = self._inbox.get(timeout=self._idle_wait()) if wait else self._inbox.get_nowait()
            while True:
                if item is not None:
                    self._due.append(item)
                item = self._inbox.get_nowait()
        except Empty:
            pass
        self._scheduler.advance_clock(self._clock())
        self._due = deque(boundary_order(self._due))
        while self._due:
            self._perform(self._due.popleft())

    def _idle_wait(self) -> float:
        return min(IDLE_WAIT_S, max(0.0, self._scheduler.next_deadline - self._clock()))

    def _perform(self, call: Call) -> None:
        if not call.future.set_running_or_notify_cancel():
            return
        try:
            result = call.work()
        except InvariantBroken as error:
            call.future.set_exception(error)
            raise
        except Exception as error:
            call.future.set_exception(error)
        else:
            call.future.set_result(result)

    def _advance(self) -> bool:
        """Effects and a step, as far as there are any; False if there was nothing to do."""
        if self._depth == 1:
            self._tell()
        busy = self._launch_next() if not self._flights else True
        self._launch_ahead()
        self._tell()
        if self._flights:
            self._finish(self._flights.popleft())
        return busy

    def _launch_next(self) -> bool:
        """The next step that sees everything that is known; False if there is none, and nothing else was done."""
        effects = self._scheduler.prepare()
        for effect in effects:
            self._scheduler.effect_settled(effect, self._apply(effect))
        plan = self._scheduler.plan()
        if plan is not None:
            self._launch(plan)
        return plan is not None or bool(effects)

    def _launch_ahead(self) -> None:
        """The step after the one in flight, before that one is read, if the device and the scheduler allow it."""
        if not self._flights or len(self._flights) >= self._depth or self._flights[-1].failure is not None:
            return
        ahead = self._scheduler.plan_ahead()
        if ahead is None:
            return
        plan, reservations = ahead
        for reservation in reservations:
            self._apply(reservation)
        self._launch(plan)

    def _launch(self, plan: StepPlan) -> None:
        flight = Flight(plan)
        if isinstance(plan, Prefill):
            plan = replace(plan, watch=self._watch(plan))
        try:
            flight.ticket = self._device.launch(plan)
        except DeviceError as error:
            flight.failure = error
        self._flights.append(flight)
        self._on_launch(flight.request_ids)

    def _finish(self, flight: Flight) -> None:
        """Wait for the oldest step and book it."""
        result = None
        if flight.ticket is not None:
            try:
                result = self._device.await_result(flight.ticket)
            except DeviceError as error:
                flight.failure = error
        self.settled_at = self._clock()
        self._scheduler.advance_clock(self.settled_at)
        if result is None:
            log.error("step failed", reason=str(flight.failure), request_ids=flight.request_ids)
            self.counters.failed_steps += 1
            self._scheduler.fail()
            return
        self.counters.count(flight, result)
        self._scheduler.settle(result)

    def _apply(self, effect: Effect) -> EffectOutcome | None:
        """The device's answer; None if it failed, and the scheduler does without."""
        try:
            return self._device.apply(effect)
        except DeviceError as error:
            self.counters.failed_effects += 1
            log.error(
                "effect failed", effect=type(effect).__name__, request_ids=self._requests_of(effect), reason=str(error)
            )
            return None

    def _requests_of(self, effect: Effect) -> list[RequestId]:
        if isinstance(effect, CopyBlocks):
            return [copy.sequence.request_id for copy in self._scheduler.kv.copies]
        request_id: RequestId | None = getattr(effect, "request_id", None)
        return [] if request_id is None else [request_id]

    def _stopped(self) -> LoopStopped:
        """The log has the whole failure, with the request's story."""
        if self.failure is None:
            return LoopStopped("the step loop was stopped")
        return LoopStopped(f"the step loop failed: {first_line(self.failure)}")

    def _close(self) -> None:
        """Take no more calls, and refuse those that wait."""
        with self._closing:
            self._closed = True
        while not self._inbox.empty():
            item = self._inbox.get_nowait()
            if item is not None:
                self._due.append(item)
        while self._due:
            call = self._due.popleft()
            if call.future.set_running_or_notify_cancel():
                call.future.set_exception(self._stopped())
