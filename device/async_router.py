"""The asynchronous router: the next step is launched, fed on the device, before the last one is read. Depth 2.

    host     pack t+1 | issue t+1 | await t, settle t | pack t+2 | issue t+2 | await t+1 ...
    device   t .............. | t+1 ......................... | t+2 .....................

A step leaves its drawn ids in cells on the device, one for each draw; a fed row computes what it finds in its request's
cell. Kernels, packing and draws are those of the synchronous router, which this one is made of.
"""

from dataclasses import dataclass

from device.fed_rows import fed_draws, fed_rows
from device.kv_pool import KvPool
from device.layer_watch import watch_of
from device.model_runner import ModelRunner, StepInput
from device.plan_check import check_plan
from device.reservations import Reservations
from device.router import SyncRouter
from device.step_queue import Issued, Outcome, StepQueue, ThreadQueue
from device.stream_queue import StreamQueue
from scheduler.adapters import AdapterFacts, AdapterRefused, LoraCommand
from scheduler.contract import Decode, DecodeFed, DeviceError, DeviceFacts, DeviceIo, Fault, StepPlan, StepResult
from scheduler.effects import (
    DetachSlot,
    Done,
    DropSequenceState,
    Effect,
    EffectOutcome,
    EpShutdown,
    Quiesce,
    ReadLogits,
    ReleaseSeq,
    Reserved,
    ReserveKv,
    Rollback,
    SyncSecondary,
    Ticket,
)
from scheduler.ids import RequestId

DEPTH = 2


@dataclass(slots=True)
class _InFlight:
    """cells: by request, the number of its draw in the step. completed: what came of it, once it was read."""

    step: StepInput
    issued: Issued
    cells: dict[RequestId, int]
    completed: Outcome | DeviceError | None = None


class AsyncRouter(DeviceIo):
    """See DeviceIo. Owns `inner`, which must not be used beside it.

    What a step fails with is told by `launch` where it shows there, else by `await_result`.
    """

    def __init__(self, inner: SyncRouter) -> None:
        self._inner = inner
        runner, lane = inner.runner, inner.effects.lane
        on_cuda = runner.device.type == "cuda"
        self._queue: StepQueue = StreamQueue(runner, lane) if on_cuda else ThreadQueue(runner, lane)
        self._in_flight: dict[Ticket, _InFlight] = {}
        self._reservations = Reservations()
        self._launched = 0

    @property
    def pool(self) -> KvPool:
        """The KV pool. Raises DeviceError(EFFECT) after `teardown`."""
        return self._inner.pool

    @property
    def runner(self) -> ModelRunner:
        """The model over its pool. Raises DeviceError(EFFECT) after `teardown`."""
        return self._inner.runner

    def facts(self) -> DeviceFacts:
        return self._inner.facts()

    def max_depth(self) -> int:
        return DEPTH

    def launch(self, plan: StepPlan) -> Ticket:
        """See DeviceIo. The host does not wait, for this step or any other."""
        runner = self._inner.runner
        if len(self._in_flight) >= DEPTH:
            raise _refused(f"{len(self._in_flight)} steps are in flight: await one first")
        if isinstance(plan, DecodeFed):
            return self._launch_fed(plan)
        check_plan(plan, self.facts())
        ticket = self._issue(runner.pack(plan.rows, watch=watch_of(plan)), None)
        self._reservations.clear()
        return ticket

    def _launch_fed(self, plan: DecodeFed) -> Ticket:
        if len(plan.rows) != len(plan.draws):
            raise _refused(f"a fed step of {len(plan.rows)} rows with {len(plan.draws)} draws")
        cells = self._cells_of(plan)
        rows = fed_rows(plan)
        check_plan(Decode(rows), self.facts())
        self._reservations.check(plan)
        ticket = self._issue(self._inner.runner.pack(rows, fed_draws(plan)), cells)
        self._reservations.take(plan)
        return ticket

    def _cells_of(self, plan: DecodeFed) -> list[int]:
        """By row, its cell. Only the step launched last has any."""
        newest = self._in_flight.get(Ticket(self._launched - 1))
        if newest is None:
            raise _refused("a fed step without a step in flight to feed it: launch a Decode")
        missing = [row.request_id for row in plan.rows if row.request_id not in newest.cells]
        if missing:
            raise _refused(f"{', '.join(missing)}: fed, but the step in flight draws no token for it")
        return [newest.cells[row.request_id] for row in plan.rows]

    def _issue(self, step: StepInput, fed: list[int] | None) -> Ticket:
        issued = self._queue.issue(step, fed)
        self._inner.effects.drop_logits()
        ticket = Ticket(self._launched)
        self._launched += 1
        cells = {drawn.request_id: number for number, drawn in enumerate(step.drawn)}
        self._in_flight[ticket] = _InFlight(step, issued, cells)
        return ticket

    def complete(self, ticket: Ticket) -> None:
        """Read what came of a step, in whatever order; it is in flight until it is awaited."""
        self._completed(self._find(ticket))

    @staticmethod
    def _completed(flight: _InFlight) -> Outcome | DeviceError:
        if flight.completed is None:
            try:
                flight.completed = flight.issued.wait()
            except DeviceError as error:
                flight.completed = error
        return flight.completed

    def await_result(self, ticket: Ticket) -> StepResult:
        """See DeviceIo. Steps may be awaited in any order."""
        flight = self._find(ticket)
        del self._in_flight[ticket]
        outcome = self._completed(flight)
        if isinstance(outcome, DeviceError):
            raise outcome
        self._inner.effects.keep_logits(ticket, flight.step, outcome.logits)
        return StepResult(ticket, outcome.tokens)

    def _find(self, ticket: Ticket) -> _InFlight:
        flight = self._in_flight.get(ticket)
        if flight is None:
            raise DeviceError(Fault.EFFECT, f"ticket {ticket} is not in flight: it was awaited, or never launched")
        return flight

    def apply(self, effect: Effect) -> EffectOutcome:
        """See DeviceIo. What moves state is a DeviceError(EFFECT) while a step is in flight."""
        effects = self._inner.effects
        match effect:
            case ReserveKv():
                return Reserved(self._reservations.reserve(effect))
            case Rollback(request_id):
                return Reserved(self._reservations.roll_back(request_id))
            case ReadLogits() | SyncSecondary() | EpShutdown() | DropSequenceState() | DetachSlot():
                return effects.apply(effect)
            case ReleaseSeq() if self._in_flight:
                self._queue.run(lambda: effects.apply(effect))
                return Done()
            case Quiesce():
                self._queue.drain()
                return effects.apply(effect)
            case _:
                if self._in_flight:
                    raise DeviceError(
                        Fault.EFFECT, f"{type(effect).__name__} with {len(self._in_flight)} steps in flight: await them"
                    )
                self._queue.drain()
                return effects.apply(effect)

    def lora(self, command: LoraCommand) -> tuple[AdapterFacts, ...]:
        if self._in_flight:
            raise AdapterRefused(f"{type(command).__name__} while a step runs: ask again when nothing does")
        return self._inner.lora(command)

    def teardown(self) -> None:
        """See DeviceIo. Steps in flight run to their end first; nobody hears of them."""
        try:
            self._queue.close()
        finally:
            self._in_flight.clear()
            self._inner.teardown()


def _refused(message: str) -> DeviceError:
    return DeviceError(Fault.FORWARD, message)
