"""Item 10 of the conformance checklist: adapters change after the last release, and a device is given up in order.

The real loop, scheduler and routers over the tiny model and adapters of it, one loop's thread as in a node.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from routers import build
from scheduler_drive import decode_scheduler, request
from tiny_adapter import save_tiny_adapter
from tiny_model import save_tiny_model

from device.recorded_router import RecordingRouter
from device.trace_text import parse_trace
from handoff.adapter_desk import AdapterDesk
from handoff.step_loop import StepLoop
from scheduler.adapters import AdapterFacts, ListAdapters, LoadAdapter, LoraCommand, UnloadAdapter
from scheduler.commands import CancelRequest, Submit
from scheduler.contract import DeviceIo
from scheduler.errors import CommandRejected
from scheduler.events import BoundaryEffects
from scheduler.ids import RequestId
from scheduler.policies import Preemption, SchedulingPolicy
from scheduler.slots import SlotLimits

WAIT_S = 30.0
BLOCKS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and in it the adapters "one" and "two"."""
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_model(path)
    for seed, name in enumerate(("one", "two")):
        save_tiny_adapter(path / name, seed, size=2.0)
    return path


class Served:
    """A loop over a device. tokens: by request. on_token: called on the loop's thread where a boundary brought any."""

    def __init__(self, device: DeviceIo) -> None:
        self.device = RecordingRouter(device)
        facts = device.facts()
        policy = SchedulingPolicy(preemption=Preemption.SPILL)
        self.scheduler = decode_scheduler(
            facts.total_blocks, policy=policy, state=SlotLimits(facts.slots), max_model_len=64
        )
        self.desk = AdapterDesk(self.scheduler, self.device)
        self.loop = StepLoop(self.scheduler, self.device, self._observe, time.monotonic, "test")
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, Future[None]] = {}
        self.on_token: Callable[[], None] = lambda: None

    def _observe(self, effects: BoundaryEffects) -> None:
        """As a node does: what came out is told, then the desk serves."""
        for output in effects.outputs:
            assert output.token is not None
            self.tokens[output.request_id].append(output.token)
        if effects.outputs:
            self.on_token()
        for name in effects.retired:
            self.ended[name].set_result(None)
        self.desk.serve()

    def submit(self, name: str, max_tokens: int, adapter: str | None = None) -> None:
        """On the loop's thread."""
        first = sum(name.encode()) % 50
        asked = request(name, range(first, first + 6), max_tokens, adapter=adapter)
        self.tokens[name], self.ended[name] = [], Future()
        self.scheduler.apply(Submit(asked))

    def ask(self, command: LoraCommand) -> "Future[tuple[AdapterFacts, ...]]":
        """On the loop's thread."""
        table: Future[tuple[AdapterFacts, ...]] = Future()
        self.desk.ask(command, table)
        return table

    def do(self, work: Callable[[], Any]) -> Any:
        return self.loop.call(work).result(WAIT_S)

    def load(self, folder: Path, *names: str) -> None:
        for name in names:
            self.do(lambda name=name: self.ask(LoadAdapter(name, str(folder / name)))).result(WAIT_S)

    def wait_for(self, *names: str) -> None:
        for name in names:
            self.ended[name].result(WAIT_S)

    def asked(self) -> list[str]:
        """What the device was asked for, in order."""
        return [line.asked for line in parse_trace(self.device.text())]


@contextmanager
def served(device: DeviceIo) -> Iterator[Served]:
    bench = Served(device)
    bench.loop.start()
    yield bench
    bench.loop.stop(WAIT_S)
    assert bench.loop.failure is None
    assert bench.scheduler.is_drained


@pytest.fixture(params=["sync", "async"])
def bench(folder: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    with served(build(request.param, folder, total_blocks=BLOCKS)) as bench:
        bench.load(folder, "one")
        yield bench


def alone(folder: Path, name: str, max_tokens: int, adapter: str | None) -> list[int]:
    """What a request gets when nothing else happens."""
    with served(build("sync", folder, total_blocks=BLOCKS)) as bench:
        bench.load(folder, "one", "two")
        bench.do(lambda: bench.submit(name, max_tokens, adapter))
        bench.wait_for(name)
        return bench.tokens[name]


def once(bench: Served, holds: Callable[[], Any], act: Callable[[], "Future[Any]"]) -> "Future[Future[Any]]":
    """What is done on the loop's thread at the first boundary at which something holds."""
    acting: Future[Future[Any]] = Future()

    def look() -> None:
        if not acting.done() and holds():
            acting.set_result(act())

    bench.on_token = look
    return acting


def outcome(acting: "Future[Future[Any]]") -> Any:
    return acting.result(WAIT_S).result(WAIT_S)


def require_quiet_change(asked: list[str], change: str) -> None:
    """All that was launched before the change is released, and what was saved is gone."""
    before = asked[: place_of(asked, change)]
    last = {name: i for i, line in enumerate(before) for name in rows_of(line)}
    released = {
        line.split()[1].removeprefix("request_id="): i for i, line in enumerate(before) if "release_seq" in line
    }
    assert last
    assert all(released.get(name, -1) > i for name, i in last.items()), f"before {change}: {before}"
    saves = sum(line.startswith("save_sequence_state") for line in before)
    assert saves == sum(line.startswith(("restore_sequence_state", "drop_sequence_state")) for line in before)


def place_of(asked: list[str], start: str) -> int:
    return next(i for i, line in enumerate(asked) if line.startswith(start))


def rows_of(line: str) -> list[str]:
    """Whose rows a step has; none for what is no step."""
    kind, _, rows = line.partition(" ")
    return [row.partition("[")[0] for row in rows.split(", ")] if kind in ("prefill", "decode", "decode_fed") else []


def test_item_10_a_load_waits_for_the_last_release(bench: Served, folder: Path) -> None:
    def change() -> "Future[Any]":
        table = bench.ask(LoadAdapter("two", str(folder / "two")))
        bench.submit("later", 4)
        return table

    asked = once(bench, lambda: len(bench.tokens["a"]) >= 3, change)
    bench.do(lambda: (bench.submit("a", 14, "one"), bench.submit("b", 6)))
    table = outcome(asked)
    assert [facts.name for facts in table] == ["one", "two"]
    bench.wait_for("a", "b", "later")
    trace = bench.asked()
    require_quiet_change(trace, "load_adapter name=two")
    assert min(i for i, line in enumerate(trace) if "later" in rows_of(line)) > place_of(trace, "load_adapter name=two")
    bench.do(lambda: bench.submit("after", 8, "two"))
    bench.wait_for("after")
    for name, count, adapter in (("a", 14, "one"), ("b", 6, None), ("later", 4, None), ("after", 8, "two")):
        assert bench.tokens[name] == alone(folder, name, count, adapter), name


def test_item_10_an_unload_waits_for_the_requests_that_use_it(bench: Served, folder: Path) -> None:
    """And what is loaded under its name then shares nothing with it, no cached prefix either."""
    asked = once(bench, lambda: len(bench.tokens["a"]) >= 3, lambda: bench.ask(UnloadAdapter("one")))
    bench.do(lambda: bench.submit("a", 12, "one"))
    assert outcome(asked) == ()
    assert len(bench.tokens["a"]) == 12
    require_quiet_change(bench.asked(), "unload_adapter name=one")
    with pytest.raises(CommandRejected, match="adapter one is not loaded"):
        bench.do(lambda: bench.submit("b", 4, "one"))
    bench.do(lambda: bench.ask(LoadAdapter("one", str(folder / "two")))).result(WAIT_S)
    first = bench.tokens["a"]
    bench.do(lambda: bench.submit("a", 12, "one"))
    bench.wait_for("a")
    assert first == alone(folder, "a", 12, "one")
    assert bench.tokens["a"] == alone(folder, "a", 12, "two") != first


def test_item_10_a_cancelled_request_is_released_before_a_change(bench: Served) -> None:
    """At depth 2 a step of it is still in flight when it is cancelled."""

    def change() -> "Future[Any]":
        table = bench.ask(UnloadAdapter("one"))
        bench.loop.call(lambda: bench.scheduler.apply(CancelRequest(RequestId("a"))))
        return table

    asked = once(bench, lambda: len(bench.tokens["a"]) >= 4, change)
    bench.do(lambda: bench.submit("a", 30, "one"))
    assert outcome(asked) == ()
    require_quiet_change(bench.asked(), "unload_adapter name=one")


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_item_10_a_spilled_request_holds_a_change_up(bench: Served, is_cancelled: bool) -> None:
    """It carries the adapter that it was computed under. One that is cancelled is dropped from the store first."""
    names = [f"r{i}" for i in range(4)]

    def change() -> "Future[Any]":
        for name in names if is_cancelled else ():
            bench.loop.call(lambda name=name: bench.scheduler.apply(CancelRequest(RequestId(name))))  # type: ignore[misc]
        return bench.ask(UnloadAdapter("one"))

    asked = once(bench, lambda: bench.scheduler.batcher.pressure.paused, change)
    bench.do(lambda: [bench.submit(name, 16, "one") for name in names])
    assert outcome(asked) == ()
    trace = bench.asked()
    require_quiet_change(trace, "unload_adapter name=one")
    assert any(line.startswith("save_sequence_state") for line in trace)
    assert any(line.startswith("drop_sequence_state") for line in trace) == is_cancelled
    if not is_cancelled:
        assert {name: len(tokens) for name, tokens in bench.tokens.items()} == dict.fromkeys(names, 16)


def test_item_10_a_reading_command_waits_as_well(bench: Served) -> None:
    asked = once(bench, lambda: len(bench.tokens["a"]) >= 2, lambda: bench.ask(ListAdapters()))
    bench.do(lambda: bench.submit("a", 6))
    assert [facts.name for facts in outcome(asked)] == ["one"]
    require_quiet_change(bench.asked(), "list_adapters")
