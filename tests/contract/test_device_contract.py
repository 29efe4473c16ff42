"""The calls of the device contract, over every router: the conformance checklist, by its numbers.

Items 2, 3, 7, 10 and 11. Where each of the fifteen is tested stands in docs/architecture.md, "Conformance".
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from device_scenarios import SCENARIOS, Scenario, play
from routers import DEPTH_ONE, DEPTH_TWO, ROUTERS, build
from rows import make_row
from scheduler_drive import request
from tiny_model import build_tiny, save_tiny_model

from device.async_router import AsyncRouter
from device.recorded_router import RecordingRouter, ReplayRouter
from device.scripted_router import DrawsNothing, Script, ScriptedRouter
from device.trace_text import parse_trace
from scheduler.adapters import AdapterRefused, ListAdapters
from scheduler.contract import Decode, DecodeFed, DeviceError, DeviceIo, Draw, Fault, KvExhausted, Prefill, Row
from scheduler.effects import (
    CopyBlocks,
    Done,
    DropSequenceState,
    Effect,
    EffectOutcome,
    EpShutdown,
    Exhausted,
    Quiesce,
    ReleaseSeq,
    Reserved,
    ReserveKv,
    Rollback,
    SaveSequenceState,
    SyncSecondary,
    Ticket,
)
from scheduler.ids import BlockId, RequestId
from scheduler.request import SamplingParams
from scheduler.shutdown import shut_down

GREEDY = Draw(SamplingParams())
PROMPT = [1, 2, 3, 4, 5]
A = RequestId("a")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_model(path)
    return path


@pytest.fixture(params=ROUTERS)
def router(folder: Path, request: pytest.FixtureRequest) -> Iterator[DeviceIo]:
    built = build(request.param, folder)
    yield built
    built.teardown()


@pytest.fixture(params=DEPTH_TWO)
def ahead(folder: Path, request: pytest.FixtureRequest) -> Iterator[DeviceIo]:
    built = build(request.param, folder)
    yield built
    built.teardown()


def row(tokens: list[int], start: int, blocks: list[int], name: str = "a", draw: Draw | None = GREEDY) -> Row:
    past = [] if name == "a" and start == 0 else PROMPT[:start]
    return make_row(name, tokens, start, blocks, draw, past if len(past) == start else None)


def tokens_of(device: DeviceIo, plan: Prefill | Decode | DecodeFed) -> tuple[int | None, ...]:
    return device.await_result(device.launch(plan)).tokens


def fails(fault: Fault, call: Any, *arguments: Any) -> str:
    """The call must raise a DeviceError of that kind. Returns what it says."""
    with pytest.raises(DeviceError) as caught:
        call(*arguments)
    assert caught.value.fault is fault
    return str(caught.value)


def test_a_step_answers_by_row(router: DeviceIo) -> None:
    first, silent, last = row([1, 2, 3], 0, [3]), row([7, 7], 0, [8], "b", None), row([9, 8], 0, [5], "c")
    tokens = tokens_of(router, Prefill((first, silent, last)))
    assert tokens[1] is None
    assert tokens[0] == tokens_of(router, Prefill((first,)))[0]
    assert tokens[2] == tokens_of(router, Prefill((last,)))[0]


def test_decode_goes_on_from_prefill(router: DeviceIo) -> None:
    whole = tokens_of(router, Prefill((row(PROMPT, 0, [0, 1]),)))
    assert tokens_of(router, Prefill((row(PROMPT[:4], 0, [2], draw=None),))) == (None,)
    assert tokens_of(router, Decode((row(PROMPT[4:], 4, [2, 3]),))) == whole


def test_the_depth_is_said(router: DeviceIo, request: pytest.FixtureRequest) -> None:
    assert router.max_depth() == (1 if request.node.callspec.params["router"] in DEPTH_ONE else 2)
    assert router.facts().slots == 8


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (row([1, 60], 0, [1]), DeviceError),
        (row([1, 2], 0, [12]), DeviceError),
        (row(PROMPT, 0, [1]), KvExhausted),
    ],
)
def test_a_refused_plan_is_a_forward_fault_and_the_next_one_runs(
    router: DeviceIo, bad: Row, error: type[DeviceError]
) -> None:
    with pytest.raises(error) as caught:
        router.launch(Prefill((bad,)))
    assert caught.value.fault is Fault.FORWARD
    assert tokens_of(router, Prefill((row(PROMPT, 0, [0, 1]),))) != (None,)


def test_item_02_a_ticket_settles_once(router: DeviceIo) -> None:
    ticket = router.launch(Prefill((row(PROMPT, 0, [0, 1]),)))
    assert router.await_result(ticket).ticket == ticket
    assert fails(Fault.EFFECT, router.await_result, ticket)
    other = router.launch(Prefill((row(PROMPT, 0, [0, 1]),)))
    assert other != ticket
    assert fails(Fault.EFFECT, router.await_result, Ticket(other + 1))


@pytest.mark.parametrize("name", DEPTH_ONE)
def test_item_02_depth_one_refuses_what_runs_ahead(folder: Path, name: str) -> None:
    router = build(name, folder)
    running = row([5], 4, [0, 1])
    ticket = router.launch(Decode((running,)))
    assert "fed" in fails(Fault.FORWARD, router.launch, DecodeFed((running,), (GREEDY,)))
    assert router.await_result(ticket).ticket == ticket
    assert fails(Fault.UNSUPPORTED, router.apply, Rollback(A))
    assert router.apply(ReserveKv(A, (BlockId(3),))) == Reserved((BlockId(3),))
    router.teardown()


def test_item_02_a_fed_step_goes_on_as_a_plain_one_would(ahead: DeviceIo, folder: Path) -> None:
    """Down to the last bit of what it leaves in the cache."""
    plain = build("sync", folder)
    names, tables = ("a", "b"), ([4, 2, 9], [1, 7, 3])
    known = {name: [*PROMPT, i] for i, name in enumerate(names)}
    for device in (plain, ahead):
        tokens_of(device, Prefill(tuple(make_row(n, PROMPT, 0, t) for n, t in zip(names, tables, strict=True))))

    def rows() -> tuple[Row, ...]:
        parts = zip(names, tables, strict=True)
        return tuple(Row(RequestId(n), known[n], len(known[n]) - 1, len(known[n]), t, GREEDY) for n, t in parts)

    draws = (Draw(SamplingParams(temperature=0.9, seed=4)), Draw(SamplingParams(repetition_penalty=1.5)))
    running = rows()
    flying = ahead.launch(Decode(running))
    fed = ahead.launch(DecodeFed(running, draws))
    second = (ahead.await_result(flying).tokens, ahead.await_result(fed).tokens)
    first = tokens_of(plain, Decode(rows()))
    for name, token in zip(names, first, strict=True):
        assert token is not None
        known[name].append(token)
    after = rows()
    for next_row, draw in zip(after, draws, strict=True):
        next_row.draw = draw
    assert second == (first, tokens_of(plain, Decode(after)))
    assert torch.equal(pool_of(ahead), pool_of(plain))
    plain.teardown()


def pool_of(device: Any) -> torch.Tensor:
    while not hasattr(device, "pool"):
        device = device._inner
    tensor: torch.Tensor = device.pool.tensor
    return tensor


def test_item_03_a_third_step_in_flight_is_refused(ahead: DeviceIo) -> None:
    running = row([5], 4, [0, 1])
    tickets = [ahead.launch(Decode((running,))), ahead.launch(DecodeFed((running,), (GREEDY,)))]
    assert "2 steps are in flight" in fails(Fault.FORWARD, ahead.launch, DecodeFed((running,), (GREEDY,)))
    assert "2 steps are in flight" in fails(Fault.FORWARD, ahead.launch, Decode((running,)))
    assert all(ahead.await_result(ticket).tokens != (None,) for ticket in tickets)


def test_item_03_the_fourth_unread_step_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("device.async_router.DEPTH", 9)
    router = build("async", folder)
    plans = [Prefill((row([i], 0, [i], f"r{i}"),)) for i in range(4)]
    tickets = [router.launch(plan) for plan in plans[:3]]
    assert "3 steps are launched and not read" in fails(Fault.FORWARD, router.launch, plans[3])
    second = router.await_result(tickets[1])
    tickets[1] = router.launch(plans[3])
    results = [router.await_result(ticket).tokens for ticket in tickets]
    assert [results[0], second.tokens, results[2], results[1]] == [tokens_of(router, plan) for plan in plans]
    router.teardown()


def test_item_03_a_failed_wait_frees_its_slot(ahead: DeviceIo) -> None:
    wanted = tokens_of(ahead, Prefill((row(PROMPT, 0, [0, 1]),)))
    for _ in range(5):
        pool_of(ahead)[5] = float("nan")
        running = row([5], 3, [5, 6])
        tickets = ahead.launch(Decode((running,))), ahead.launch(DecodeFed((running,), (GREEDY,)))
        assert "not finite" in fails(Fault.READBACK, ahead.await_result, tickets[0])
        assert "failed" in fails(Fault.FORWARD, ahead.await_result, tickets[1])
    assert tokens_of(ahead, Prefill((row(PROMPT, 0, [0, 1]),))) == wanted
    assert pool_of(ahead).isfinite().all()


def test_item_07_results_go_by_ticket(ahead: DeviceIo) -> None:
    plans = Prefill((row([1, 2], 0, [0]),)), Prefill((row([3], 0, [1], "b"),))
    wanted = [tokens_of(ahead, plan) for plan in plans]
    tickets = [ahead.launch(plan) for plan in plans]
    assert [ahead.await_result(ticket).tokens for ticket in reversed(tickets)] == wanted[::-1]


MOVES_STATE: list[Effect] = [
    CopyBlocks(((BlockId(0), BlockId(3)),)),
    SaveSequenceState(A, (BlockId(0),), 4),
]


def test_what_moves_state_waits_until_nothing_is_in_flight(ahead: DeviceIo) -> None:
    running = row([5], 4, [0, 1])
    ticket = ahead.launch(Decode((running,)))
    for effect in MOVES_STATE:
        assert "in flight" in fails(Fault.EFFECT, ahead.apply, effect)
    with pytest.raises(AdapterRefused, match="while a step runs"):
        ahead.lora(ListAdapters())
    for effect in (Quiesce(), SyncSecondary(), DropSequenceState(A), ReleaseSeq(A, 2, "over")):
        assert ahead.apply(effect) == Done()
    ahead.await_result(ticket)
    assert all(not isinstance(ahead.apply(effect), Exhausted) for effect in MOVES_STATE)


def test_item_10_adapters_change_when_nothing_runs(router: DeviceIo) -> None:
    assert router.lora(ListAdapters()) == ()


def test_item_10_a_device_is_given_up_in_order(folder: Path) -> None:
    recorded = RecordingRouter(build("async", folder))
    running = row([5], 4, [0, 1])
    tickets = recorded.launch(Decode((running,))), recorded.launch(DecodeFed((running,), (GREEDY,)))
    reports: list[str] = []
    shut_down(recorded, lambda what, error: reports.append(what), tickets, [ReleaseSeq(A, 2, "over")])
    assert [line.asked for line in parse_trace(recorded.text())][2:] == [
        "release_seq request_id=a slot=2 what=over",
        "ep_shutdown",
        "quiesce",
        "teardown",
    ]
    assert [line.answer for line in parse_trace(recorded.text())][:2] != [None, None]
    assert reports == []


def test_item_10_whatever_fails_the_rest_is_given_up_too(router: DeviceIo) -> None:
    told = DeviceError(Fault.EFFECT, "told so")
    inner = DrawsNothing(router.facts())
    recorded = RecordingRouter(ScriptedRouter(inner, Script(effects=dict.fromkeys(range(3), told))))
    reports: dict[str, Exception] = {}
    shut_down(recorded, reports.__setitem__, [Ticket(77)], [DropSequenceState(A)])
    assert list(reports) == ["step 77", "DropSequenceState", "EpShutdown", "Quiesce"]
    assert [line.asked for line in parse_trace(recorded.text())][-1] == "teardown"


def test_item_10_mirror_ranks_are_stopped_once(folder: Path) -> None:
    stopped: list[str] = []

    def broken() -> None:
        stopped.append("broken")
        raise OSError("gone")

    mirrors = [lambda: stopped.append("first"), broken, lambda: stopped.append("last")]
    router = AsyncRouter(build_tiny(folder, mirrors=mirrors))
    reports: list[str] = []
    assert router.apply(EpShutdown()) == Done()
    shut_down(router, lambda what, error: reports.append(what))
    assert stopped == ["first", "broken", "last"]
    assert reports == []


class SlotWatch(RecordingRouter):
    """Notices a slot that changes hands without a release between. taken: how often one changed hands."""

    def __init__(self, inner: DeviceIo) -> None:
        super().__init__(inner)
        self.taken = 0
        self._owners: dict[int, str] = {}

    def launch(self, plan: Prefill | Decode | DecodeFed) -> Ticket:
        for own in plan.rows:
            self.taken += own.slot not in self._owners
            assert self._owners.setdefault(own.slot, own.request_id) == own.request_id
        return super().launch(plan)

    def apply(self, effect: Effect) -> EffectOutcome:
        if isinstance(effect, ReleaseSeq):
            assert self._owners.pop(effect.slot) == effect.request_id
        return super().apply(effect)


@pytest.mark.parametrize("name", ROUTERS)
def test_item_11_a_slot_is_released_before_another_sequence_has_it(folder: Path, name: str) -> None:
    """Compaction is not something that our scheduler asks for."""
    scenario = Scenario(tuple(request(f"r{i}", range(i, i + 4), 4) for i in range(20)))
    watch = SlotWatch(build(name, folder, total_blocks=40, slots=4))
    assert len(play(scenario, watch).finishes) == watch.taken == 20


def test_a_recorded_run_is_replayed_without_its_device(folder: Path) -> None:
    scenario = SCENARIOS["spilled"]
    recorded = RecordingRouter(build("async", folder, total_blocks=scenario.blocks))
    played = play(scenario, recorded)
    recorded.teardown()
    replay = ReplayRouter(recorded.text(), recorded.facts(), depth=2)
    assert play(scenario, replay).streams == played.streams
    replay.teardown()
    assert replay.is_over
