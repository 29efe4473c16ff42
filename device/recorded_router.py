"""What a device was asked and what it answered: recorded from any router, and answered again without one."""

from collections.abc import Callable
from typing import TypeVar

from device.labels import effect_label, plan_label
from device.trace_text import Adapters, Answer, LostResult, TraceBroken, TraceLine, parse_trace
from scheduler.adapters import AdapterFacts, AdapterRefused, LoraCommand
from scheduler.contract import DeviceError, DeviceFacts, DeviceIo, Fault, StepPlan, StepResult
from scheduler.effects import Effect, EffectOutcome, Ticket

T = TypeVar("T")
_TEARDOWN = "teardown"


class RecordingRouter(DeviceIo):
    """Passes all calls on to `inner`, and writes a line for each launch, effect, adapter command and teardown."""

    def __init__(self, inner: DeviceIo) -> None:
        self._inner = inner
        self._lines: list[TraceLine] = []
        self._steps: dict[Ticket, TraceLine] = {}

    def text(self) -> str:
        """See device/trace_text.py; a step's answer is that of its await."""
        return "".join(f"{line.text()}\n" for line in self._lines)

    def facts(self) -> DeviceFacts:
        return self._inner.facts()

    def max_depth(self) -> int:
        return self._inner.max_depth()

    def launch(self, plan: StepPlan) -> Ticket:
        line = self._begin(plan_label(plan))
        ticket = self._noting(line, lambda: self._inner.launch(plan))
        self._steps[ticket] = line
        return ticket

    def await_result(self, ticket: Ticket) -> StepResult:
        line = self._steps.pop(ticket, None)
        try:
            result = self._inner.await_result(ticket)
        except DeviceError as error:
            if line is not None:
                line.answer = LostResult(error)
            raise
        if line is not None:
            line.answer = result.tokens
        return result

    def apply(self, effect: Effect) -> EffectOutcome:
        line = self._begin(effect_label(effect))
        outcome = self._noting(line, lambda: self._inner.apply(effect))
        line.answer = outcome
        return outcome

    def lora(self, command: LoraCommand) -> tuple[AdapterFacts, ...]:
        line = self._begin(effect_label(command))
        table = self._noting(line, lambda: self._inner.lora(command))
        line.answer = table
        return table

    def teardown(self) -> None:
        self._begin(_TEARDOWN)
        self._inner.teardown()

    def _begin(self, asked: str) -> TraceLine:
        self._lines.append(TraceLine(asked))
        return self._lines[-1]

    @staticmethod
    def _noting(line: TraceLine, call: Callable[[], T]) -> T:
        try:
            return call()
        except (DeviceError, AdapterRefused) as error:
            line.answer = error
            raise


class ReplayRouter(DeviceIo):
    """Answers as a trace says. Raises TraceBroken when it is asked something else, or something more.

    trace: text as `RecordingRouter` writes it, or as somebody wrote it by hand. facts, depth: of the device to be.
    """

    def __init__(self, trace: str, facts: DeviceFacts, depth: int = 1) -> None:
        self._lines = parse_trace(trace)
        self._next = 0
        self._facts = facts
        self._depth = depth
        self._steps: dict[Ticket, Answer] = {}

    @property
    def is_over(self) -> bool:
        """Whether all that is in the trace was asked."""
        return self._next == len(self._lines)

    def facts(self) -> DeviceFacts:
        return self._facts

    def max_depth(self) -> int:
        return self._depth

    def launch(self, plan: StepPlan) -> Ticket:
        answer = self._answer(plan_label(plan))
        ticket = Ticket(self._next)
        self._steps[ticket] = answer
        return ticket

    def await_result(self, ticket: Ticket) -> StepResult:
        if ticket not in self._steps:
            raise DeviceError(Fault.EFFECT, f"ticket {ticket} is not in flight: it was awaited, or never launched")
        answer = self._steps.pop(ticket)
        if isinstance(answer, LostResult):
            raise answer.error
        if not isinstance(answer, tuple):
            raise TraceBroken(f"line {ticket} has no tokens, and its step is awaited")
        return StepResult(ticket, answer)  # type: ignore[arg-type]  # the answer to a plan is tokens

    def apply(self, effect: Effect) -> EffectOutcome:
        return self._answer(effect_label(effect))  # type: ignore[return-value]  # the answer to an effect is an outcome

    def lora(self, command: LoraCommand) -> Adapters:
        return self._answer(effect_label(command))  # type: ignore[return-value]  # the answer to a command is the table

    def teardown(self) -> None:
        self._answer(_TEARDOWN)

    def _answer(self, asked: str) -> Answer:
        """The next line's answer; raised if it is an error."""
        if self.is_over:
            raise TraceBroken(f"{asked!r} is asked after the last line of the trace")
        line = self._lines[self._next]
        self._next += 1
        if line.asked != asked:
            raise TraceBroken(f"line {self._next} of the trace is {line.asked!r}, and {asked!r} is asked")
        if isinstance(line.answer, DeviceError | AdapterRefused):
            raise line.answer
        return line.answer
