"""Adapter commands wait for a quiet device, hold admission until then, and tell their caller how it went."""

from concurrent.futures import Future

import pytest
from kv_machine import KvMachine
from scheduler_drive import BLOCK_SIZE, Stepper, decode_scheduler, request

from handoff.adapter_desk import AdapterDesk
from scheduler.adapters import AdapterFacts, AdapterRefused, ListAdapters, LoadAdapter, LoraCommand, UnloadAdapter
from scheduler.commands import Submit
from scheduler.effects import ReleaseSeq
from scheduler.errors import CommandRejected
from scheduler.ids import RequestId
from scheduler.request import FinishReason
from scheduler.slots import SlotLimits

LOAD = LoadAdapter("sql", "/adapters/sql")
LENGTH = FinishReason.LENGTH


class AdapterMachine(KvMachine):
    """A KvMachine with an adapter table. commands: those that reached it. error: what the next one raises."""

    def __init__(self, slots: int) -> None:
        super().__init__(16, BLOCK_SIZE, slots=slots)
        self.commands: list[LoraCommand] = []
        self.table: dict[str, AdapterFacts] = {}
        self.error: Exception | None = None

    def lora(self, command: LoraCommand) -> tuple[AdapterFacts, ...]:
        self.commands.append(command)
        if self.error is not None:
            raise self.error
        if isinstance(command, LoadAdapter):
            self.table[command.name] = AdapterFacts(command.name, f"digest of {command.path}", 8, ("q_proj",))
        elif isinstance(command, UnloadAdapter):
            del self.table[command.name]
        return tuple(self.table.values())


class Bench:
    """A node's scheduler, device and desk, stepped by hand."""

    def __init__(self, slots: int = 0) -> None:
        self.scheduler = decode_scheduler(state=SlotLimits(slots))
        self.device = AdapterMachine(slots)
        self.stepper = Stepper(self.scheduler, io=self.device)
        self.desk = AdapterDesk(self.scheduler, self.device)

    def submit(self, name: str, adapter: str | None = None, max_tokens: int = 3) -> None:
        self.scheduler.apply(Submit(request(name, [1, 2, 3], max_tokens, adapter=adapter)))

    def step(self) -> None:
        """One step, and the boundary after it, at which the desk serves."""
        self.stepper.step()
        self.desk.serve()

    def ask(self, command: LoraCommand) -> "Future[tuple[AdapterFacts, ...]]":
        table: Future[tuple[AdapterFacts, ...]] = Future()
        self.desk.ask(command, table)
        return table

    def load(self) -> None:
        """At once: nothing may run."""
        asked = self.ask(LOAD)
        self.desk.serve()
        assert asked.done()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_quiet_device_is_changed_at_once(bench: Bench) -> None:
    asked = bench.ask(LOAD)
    bench.desk.serve()
    facts = AdapterFacts("sql", "digest of /adapters/sql", 8, ("q_proj",))
    assert asked.result(0) == (facts,)
    assert bench.desk.digests == {"sql": facts.digest}
    assert not bench.scheduler.is_admission_held
    bench.submit("a", "sql")
    bench.stepper.run()
    assert bench.stepper.finishes == {RequestId("a"): LENGTH}


def test_it_waits_until_what_was_admitted_has_ended(bench: Bench) -> None:
    bench.submit("a")
    bench.step()
    asked = bench.ask(LOAD)
    bench.submit("b")
    while not bench.stepper.finishes:
        assert not asked.done()
        assert bench.scheduler.is_admission_held
        assert "b" not in bench.stepper.tokens
        bench.step()
    assert bench.device.commands == [LOAD]
    assert asked.done()
    bench.stepper.run()
    assert bench.stepper.finishes == {RequestId("a"): LENGTH, RequestId("b"): LENGTH}


def test_it_waits_until_the_device_knows_of_the_last_release() -> None:
    bench = Bench(slots=2)
    bench.submit("a", max_tokens=2)
    bench.step()
    asked = bench.ask(LOAD)
    bench.step()
    assert bench.stepper.finishes == {RequestId("a"): LENGTH}
    assert bench.device.effects == []
    assert not asked.done()
    bench.step()
    assert [type(effect) for effect in bench.device.effects] == [ReleaseSeq]
    assert asked.done()


def test_commands_are_served_in_the_order_asked(bench: Bench) -> None:
    commands: list[LoraCommand] = [LOAD, ListAdapters(), UnloadAdapter("sql")]
    asked = [bench.ask(command) for command in commands]
    bench.desk.serve()
    assert bench.device.commands == commands
    assert [len(future.result(0)) for future in asked] == [1, 1, 0]
    assert bench.desk.digests == {}
    with pytest.raises(CommandRejected, match="adapter sql is not loaded"):
        bench.submit("a", "sql")


def test_a_cancelled_command_is_withdrawn_and_admission_goes_on(bench: Bench) -> None:
    bench.submit("a", max_tokens=20)
    bench.step()
    asked = bench.ask(LOAD)
    bench.submit("b")
    bench.step()
    assert bench.scheduler.is_admission_held
    assert asked.cancel()
    bench.step()
    assert not bench.scheduler.is_admission_held
    bench.stepper.run()
    assert bench.stepper.finishes[RequestId("b")] is LENGTH
    assert bench.device.commands == []


def test_a_cancelled_command_behind_another_is_never_performed(bench: Bench) -> None:
    bench.submit("a")
    bench.step()
    first, second = bench.ask(ListAdapters()), bench.ask(LOAD)
    assert second.cancel()
    while not first.done():
        bench.step()
    assert bench.device.commands == [ListAdapters()]
    assert not bench.scheduler.is_admission_held


def test_an_adapter_that_requests_wait_for_is_not_unloaded(bench: Bench) -> None:
    bench.load()
    bench.submit("a", "sql")
    bench.submit("b")
    asked = bench.ask(UnloadAdapter("sql"))
    bench.desk.serve()
    with pytest.raises(AdapterRefused, match=r"adapter sql has requests that wait \(1\): ask when they are done"):
        asked.result(0)
    assert bench.device.commands == [LOAD]
    assert not bench.scheduler.is_admission_held
    bench.stepper.run()
    assert bench.stepper.finishes[RequestId("a")] is LENGTH
    again = bench.ask(UnloadAdapter("sql"))
    bench.desk.serve()
    assert again.result(0) == ()


@pytest.mark.parametrize("error", [AdapterRefused("rank 512 is over 256"), RuntimeError("out of order")])
def test_the_caller_gets_the_devices_error_and_the_desk_goes_on(bench: Bench, error: Exception) -> None:
    bench.load()
    bench.device.error = error
    failing = bench.ask(LoadAdapter("other", "/adapters/other"))
    bench.desk.serve()
    assert failing.exception(0) is error
    assert list(bench.desk.digests) == ["sql"]
    assert not bench.scheduler.is_admission_held
    bench.device.error = None
    bench.submit("a", "sql")
    bench.stepper.run()
    assert bench.stepper.finishes == {RequestId("a"): LENGTH}


def test_who_waits_when_the_loop_ends_is_told() -> None:
    bench = Bench()
    bench.submit("a")
    bench.stepper.step()
    asked, withdrawn = bench.ask(LOAD), bench.ask(ListAdapters())
    withdrawn.cancel()
    bench.desk.close(RuntimeError("the step loop has ended"))
    with pytest.raises(RuntimeError, match="has ended"):
        asked.result(0)
    assert bench.device.commands == []


def test_a_used_adapter_is_not_replaced() -> None:
    bench = Bench()
    bench.load()
    bench.scheduler.is_admission_held = True
    bench.submit("waits", adapter="sql")
    asked = bench.ask(LoadAdapter("sql", "/other/content"))
    bench.desk.serve()
    with pytest.raises(AdapterRefused, match="requests that wait"):
        asked.result(0)
