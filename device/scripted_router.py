"""A router that does what a test says: tokens by request, faults at chosen calls, completion in another order.

Tokens are put in where a result is handed out, so that all below, running ahead too, is what it is without a script.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from device.reservations import Reservations
from scheduler.adapters import AdapterFacts, AdapterRefused, LoraCommand
from scheduler.contract import DecodeFed, DeviceError, DeviceFacts, DeviceIo, Fault, StepPlan, StepResult
from scheduler.effects import (
    Done,
    DropSequenceState,
    Effect,
    EffectOutcome,
    Exhausted,
    ReadLogits,
    Reserved,
    ReserveKv,
    RestoreSequenceState,
    Rollback,
    SaveSequenceState,
    Ticket,
)
from scheduler.ids import RequestId


@dataclass(frozen=True, slots=True)
class Script:
    """tokens: by request, its first output, its second, ...; what is not here is as the inner device draws it.

    launches, awaits, effects: what the n-th such call raises, counted from 0. A launch or effect that fails does not
    reach the inner device; a result that is lost does.
    newest_first: of two steps in flight the later one completes first; for an inner device that is Completing.
    lag: called before a result is handed out.
    """

    tokens: Mapping[RequestId, Sequence[int]] = field(default_factory=dict)
    launches: Mapping[int, DeviceError] = field(default_factory=dict)
    awaits: Mapping[int, DeviceError] = field(default_factory=dict)
    effects: Mapping[int, DeviceError] = field(default_factory=dict)
    newest_first: bool = False
    lag: Callable[[Ticket], None] | None = None


@dataclass(frozen=True, slots=True)
class _Launched:
    """outputs: by row, whose and which of its outputs is drawn; None for a row without a draw."""

    outputs: tuple[tuple[RequestId, int] | None, ...]


class Completing(DeviceIo, Protocol):
    """A device that can read a step's result before it is awaited."""

    def complete(self, ticket: Ticket) -> None: ...


class ScriptedRouter(DeviceIo):
    """See Script. inner: a device, or a DrawsNothing where the script is all there is."""

    def __init__(self, inner: Completing | DeviceIo, script: Script) -> None:
        self._inner = inner
        self._script = script
        self._launched: dict[Ticket, _Launched] = {}
        self._calls = {"launches": 0, "awaits": 0, "effects": 0}

    def facts(self) -> DeviceFacts:
        return self._inner.facts()

    def max_depth(self) -> int:
        return self._inner.max_depth()

    def launch(self, plan: StepPlan) -> Ticket:
        self._fail("launches", self._script.launches)
        outputs = _outputs(plan)
        ticket = self._inner.launch(plan)
        self._launched[ticket] = _Launched(outputs)
        return ticket

    def await_result(self, ticket: Ticket) -> StepResult:
        if ticket not in self._launched:
            return self._inner.await_result(ticket)  # which says what is wrong
        if self._script.lag is not None:
            self._script.lag(ticket)
        if self._script.newest_first:
            self._complete_newest_first()
        launched = self._launched.pop(ticket)
        result = self._inner.await_result(ticket)
        self._fail("awaits", self._script.awaits)
        tokens = zip(launched.outputs, result.tokens, strict=True)
        return StepResult(ticket, tuple(self._token(output, drawn) for output, drawn in tokens))

    def apply(self, effect: Effect) -> EffectOutcome:
        try:
            self._fail("effects", self._script.effects)
        except DeviceError:
            if isinstance(effect, RestoreSequenceState):
                self._inner.apply(DropSequenceState(effect.request_id))
            raise
        return self._inner.apply(effect)

    def lora(self, command: LoraCommand) -> tuple[AdapterFacts, ...]:
        return self._inner.lora(command)

    def teardown(self) -> None:
        self._inner.teardown()

    def _fail(self, kind: str, faults: Mapping[int, DeviceError]) -> None:
        ordinal = self._calls[kind]
        self._calls[kind] += 1
        if ordinal in faults:
            raise faults[ordinal]

    def _complete_newest_first(self) -> None:
        for ticket in sorted(self._launched, reverse=True):
            cast(Completing, self._inner).complete(ticket)

    def _token(self, output: tuple[RequestId, int] | None, drawn: int | None) -> int | None:
        if output is None:
            return None
        request_id, number = output
        script = self._script.tokens.get(request_id, ())
        # An over-run draws a token after the last.
        return script[number] if number < len(script) else drawn


def _outputs(plan: StepPlan) -> tuple[tuple[RequestId, int] | None, ...]:
    ahead = isinstance(plan, DecodeFed)
    return tuple(
        (row.request_id, row.end + ahead - row.prompt_tokens) if ahead or row.draw is not None else None
        for row in plan.rows
    )


class DrawsNothing(DeviceIo):
    """A device without a model, memory or work: token 0 for each draw. It keeps the rules of launches and tickets.

    depth: how many steps may be in flight.
    """

    def __init__(self, facts: DeviceFacts, depth: int = 1) -> None:
        self._facts = facts
        self._depth = depth
        self._launched = 0
        self._in_flight: dict[Ticket, StepResult] = {}
        self._reservations = Reservations()

    def facts(self) -> DeviceFacts:
        return self._facts

    def max_depth(self) -> int:
        return self._depth

    def launch(self, plan: StepPlan) -> Ticket:
        if len(self._in_flight) >= self._depth:
            raise DeviceError(Fault.FORWARD, f"{len(self._in_flight)} steps are in flight: await one first")
        if isinstance(plan, DecodeFed):
            if not self._in_flight:
                raise DeviceError(Fault.FORWARD, "a fed step without a step in flight to feed it: launch a Decode")
            self._reservations.check(plan)
            self._reservations.take(plan)
        else:
            self._reservations.clear()
        ticket = Ticket(self._launched)
        self._launched += 1
        self._in_flight[ticket] = StepResult(ticket, tuple(None if o is None else 0 for o in _outputs(plan)))
        return ticket

    def await_result(self, ticket: Ticket) -> StepResult:
        if ticket not in self._in_flight:
            raise DeviceError(Fault.EFFECT, f"ticket {ticket} is not in flight: it was awaited, or never launched")
        return self._in_flight.pop(ticket)

    def complete(self, ticket: Ticket) -> None:
        """There is nothing to read."""

    def apply(self, effect: Effect) -> EffectOutcome:
        """Nothing is ever saved, so nothing can be restored."""
        match effect:
            case SaveSequenceState():
                return Exhausted()
            case ReserveKv():
                return Reserved(self._reservations.reserve(effect))
            case Rollback(request_id) if self._depth > 1:
                return Reserved(self._reservations.roll_back(request_id))
            case ReadLogits() | RestoreSequenceState() | Rollback():
                raise DeviceError(Fault.UNSUPPORTED, f"{type(effect).__name__}: a device without a model has none")
            case _:
                return Done()

    def lora(self, command: LoraCommand) -> tuple[AdapterFacts, ...]:
        raise AdapterRefused(f"{type(command).__name__}: a device without a model takes no adapters")

    def teardown(self) -> None:
        self._in_flight.clear()
