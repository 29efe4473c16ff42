"""The part of the scheduler machines that sends commands and notes transfers, whenever that may happen.

Each side says what its commands are. What the model foretells of a command must be what it does.
"""

from collections.abc import Container, Sequence
from dataclasses import asdict, replace
from typing import TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from kv_machine import KvMachine
from scheduler_checks import require_told
from scheduler_load import BLOCK_SIZE, INCARNATION, Act, Arrival, Setting, acts, arrivals
from scheduler_model import SchedulerModel, Telling

from scheduler.base import SchedulerBase
from scheduler.commands import CancelRequest, Command, Submit
from scheduler.errors import SchedulerError
from scheduler.events import LifecycleEvent
from scheduler.ids import HandoffId, RequestId
from scheduler.request import Request

CROWD = 8
"""So many requests at a time are enough."""
T = TypeVar("T", RequestId, HandoffId)


class CommandedMachine(RuleBasedStateMachine):
    """recent: the handoffs that came last."""

    setting: Setting
    recent: list[tuple[HandoffId, int]]
    scheduler: SchedulerBase
    model: SchedulerModel
    device: KvMachine

    def some_handoff(self, pick: int) -> tuple[HandoffId, int]:
        """One that is here; now and then one that may be over, sometimes with the wrong attempt."""
        known = [(handoff, owned.attempt) for handoff, owned in self.model.by_handoff.items()]
        if known and pick % 4 < 3:
            return known[pick % len(known)]
        handoff, attempt = self.recent[pick // 4 % len(self.recent)]
        return handoff, attempt if pick % 8 < 4 else 3 - attempt

    # Commands

    def apply(self, command: Command, incarnation: int | None = None) -> None:
        expected = self.model.apply(command, incarnation)
        before = self.everything() if expected.error is not None else None
        try:
            effects = self.scheduler.apply(command, incarnation)
        except SchedulerError as error:
            if type(error) is not expected.error:
                raise
            assert self.everything() == before, f"refused, and something has changed: {command}"
            return
        assert expected.error is None, f"{command} must raise {expected.error}"
        assert effects.result == expected.result, command
        assert effects.suppressed_pending_output == expected.suppressed
        assert effects.incarnation == INCARNATION
        self.compare(effects.events, effects.retired, self.model.tell())

    def everything(self) -> object:
        """All that can be seen from outside."""
        scheduler = self.scheduler
        counters = asdict(scheduler.counters), asdict(scheduler.batcher.pressure.counters)
        return scheduler.metrics(), scheduler.inventory(), counters, scheduler.kv.lookups, scheduler.is_drained

    def compare(self, events: Sequence[LifecycleEvent], retired: Sequence[RequestId], expected: Telling) -> None:
        require_told(events, retired, expected)
        for event in events:
            self.learn(event)

    def learn(self, event: LifecycleEvent) -> None:
        """An event with what the model can't foretell; it is possible at least."""

    # New work

    @rule(arrivals=st.lists(arrivals, min_size=1, max_size=3))
    def come(self, arrivals: Sequence[Arrival]) -> None:
        for arrival in arrivals:
            self.do(arrival)

    def arrive(self, request: Request, way: str, pick: int, armed: bool) -> None:
        """Mostly with ids that are not in use here, now and then for another life of this node or the other side."""
        usual = pick % 8 > 0
        if usual and len(self.model.owned) >= CROWD:
            return
        if usual:
            request = self.shortened(request, self.unused("r", request.request_id, self.model.owned))
        if way == "submit":
            self.apply(Submit(request), INCARNATION if pick % 2 else None)
        elif way == "stray":
            self.apply(Submit(request), INCARNATION - 1 if pick % 2 else INCARNATION + 1)
            for command in self.foreign(request, *self.some_handoff(pick)):
                self.apply(command)
        else:
            handoff = HandoffId(f"h{pick % 6}")
            if usual:
                handoff = self.unused("h", handoff, self.model.by_handoff)
            attempt = 1 + (pick % 5 == 0)
            self.begin_handoff(handoff, request, attempt, armed)
            self.recent = [(handoff, attempt), *self.recent[:2]]

    def shortened(self, request: Request, name: RequestId) -> Request:
        """The same under another name, with as many tokens at the most as the pool has room for."""
        room = self.setting.blocks * BLOCK_SIZE + 1 - len(request.prompt)
        most = max(1, min(room, request.max_tokens))
        return replace(request, request_id=name, max_tokens=most, min_tokens=min(most, request.min_tokens))

    @staticmethod
    def unused(letter: str, name: T, used: Container[T]) -> T:
        return next((other for i in range(12) if (other := type(name)(f"{letter}{i}")) not in used), name)

    def begin_handoff(self, handoff: HandoffId, request: Request, attempt: int, armed: bool) -> None:
        """This side's command for it."""
        raise NotImplementedError

    def foreign(self, request: Request, handoff: HandoffId, attempt: int) -> Sequence[Command]:
        """Commands that this side doesn't know."""
        raise NotImplementedError

    # Acts: what may come at any time for what is here already

    @precondition(lambda self: self.model.owned)
    @rule(act=acts)
    def do_something(self, act: Act) -> None:
        self.do(act)

    def do(self, item: Act | Arrival) -> None:
        if len(item) == 4:
            self.arrive(*item)
            return
        name, pick, flag = item
        getattr(self, name)(pick, flag)

    def cancel_request(self, pick: int, discard: bool) -> None:
        """One that runs, is spilled, has output that nobody has seen, or is here in any way."""
        running = [row.owned.name for row in self.model.step or ()]
        ready = [output.request_id for output in self.model.kept.outputs]
        groups = [group for group in (running, list(self.device.saved), ready, list(self.model.owned)) if group]
        group = groups[pick % len(groups)] if groups else [RequestId("r0")]
        self.apply(CancelRequest(group[pick // 4 % len(group)], discard))

    def discard_what_is_over(self) -> None:
        """Nobody is there any more to whom the last outputs could go."""
        for output in list(self.model.kept.outputs):
            if output.request_id not in self.model.owned:
                self.apply(CancelRequest(output.request_id, discard_pending_output=True))

    def renew(self, pick: int, flag: bool) -> None:
        handoff = self.some_handoff(pick)
        assert self.scheduler.renew(*handoff) == self.model.renew(*handoff)

    def proceed(self, pick: int, flag: bool) -> None:
        """The command with which a handoff succeeds here."""
        raise NotImplementedError

    def cancel_handoff(self, pick: int, flag: bool) -> None:
        raise NotImplementedError

    def start_transfer(self, pick: int, flag: bool) -> None:
        raise NotImplementedError

    def end_transfer(self, pick: int, success: bool) -> None:
        raise NotImplementedError
