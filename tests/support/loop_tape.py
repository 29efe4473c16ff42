"""What a step loop asks of its scheduler and its device, written down in its order."""

import re
from collections.abc import Callable
from typing import Any

from kv_machine import KvMachine

from scheduler.base import SchedulerBase
from scheduler.contract import StepPlan, StepResult
from scheduler.effects import Done, Effect, EffectOutcome, EpShutdown, Quiesce, Ticket

CIRCLE = re.compile(r"BO(P(Es)*(n|N[Ll]))?(a|AE*[Ll])?(WS|wF|F)?")
"""One turn of the loop: boundary, observe; if nothing is in flight prepare, effects and plan; what is reserved for a
step ahead, and that step; the oldest step awaited and booked. Small letters: there was none, or it failed."""
END = re.compile(r"[Ww]*DQT")
"""Steps in flight, mirror ranks, quiet, memory."""


class LoopTape:
    """marks: a letter for each call, see CIRCLE and END. launched: a step's ticket, None where its launch failed.

    ended: by step, in the order in which they were booked: the ticket that was settled, or None for failed.
    """

    def __init__(self) -> None:
        self.marks = ""
        self.launched: list[Ticket | None] = []
        self.awaited: list[Ticket] = []
        self.ended: list[Ticket | None] = []

    def watch(self, scheduler: SchedulerBase) -> None:
        """Write down what is asked of `scheduler` from now on."""
        self._watch(scheduler, "boundary", lambda _: "B")
        self._watch(scheduler, "prepare", lambda _: "P")
        self._watch(scheduler, "effect_settled", lambda _: "s")
        self._watch(scheduler, "plan", lambda plan: "n" if plan is None else "N")
        self._watch(scheduler, "plan_ahead", lambda ahead: "a" if ahead is None else "A")
        self._watch(scheduler, "settle", lambda _: "S")
        self._watch(scheduler, "fail", lambda _: "F")

    def _watch(self, scheduler: Any, name: str, mark: Callable[[Any], str]) -> None:
        call = getattr(scheduler, name)

        def watched(*arguments: Any) -> Any:
            if name in ("settle", "fail"):
                self.ended.append(arguments[0].ticket if arguments else None)
            answer = call(*arguments)
            self.marks += mark(answer)
            return answer

        setattr(scheduler, name, watched)


class TapedMachine(KvMachine):
    """A KvMachine that writes down what is asked of it."""

    def __init__(self, tape: LoopTape, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.tape = tape

    def launch(self, plan: StepPlan) -> Ticket:
        self.tape.launched.append(None)
        self.tape.marks += "l"
        ticket = super().launch(plan)
        self.tape.launched[-1] = ticket
        self.tape.marks = self.tape.marks[:-1] + "L"
        return ticket

    def await_result(self, ticket: Ticket) -> StepResult:
        self.tape.awaited.append(ticket)
        self.tape.marks += "w"
        result = super().await_result(ticket)
        self.tape.marks = self.tape.marks[:-1] + "W"
        return result

    def apply(self, effect: Effect) -> EffectOutcome:
        match effect:
            case EpShutdown():
                self.tape.marks += "D"
                return Done()
            case Quiesce():
                self.tape.marks += "Q"
            case _:
                self.tape.marks += "E"
        return super().apply(effect)

    def teardown(self) -> None:
        self.tape.marks += "T"
        super().teardown()


def turns_of(marks: str) -> list[str]:
    """The turns of a loop that came to its end; AssertionError where they are not what CIRCLE and END say."""
    place, turns = 0, []
    while (turn := CIRCLE.match(marks, place)) is not None:
        turns.append(turn[0])
        place = turn.end()
    assert END.fullmatch(marks, place), f"after {marks[:place]}: {marks[place:]}"
    return turns
