"""The asynchronous router's own promises; those of every router are in tests/contract/test_device_contract.py."""

from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from rows import make_row
from tiny_model import build_tiny, save_tiny_model

from device.async_router import AsyncRouter
from device.build import build_router
from device.effects import EffectApplier
from device.errors import DeviceSetupError
from device.model_runner import ModelRunner
from device.router import SyncRouter
from scheduler.contract import Decode, DecodeFed, DeviceError, Draw, Fault, KvExhausted, Prefill, Row
from scheduler.device_config import DeviceConfig
from scheduler.effects import Done, Quiesce, ReleaseSeq, Reserved, ReserveKv, Rollback
from scheduler.ids import BlockId, RequestId
from scheduler.request import SamplingParams

GREEDY = Draw(SamplingParams())
A = RequestId("a")
WAIT_S = 10.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_model(path)
    return path


@pytest.fixture
def router(folder: Path) -> Iterator[AsyncRouter]:
    built = AsyncRouter(build_tiny(folder, slots=4))
    yield built
    built.teardown()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Event:
    """Steps compute when it is set."""
    event, forward = Event(), ModelRunner.forward

    def held(runner: ModelRunner, step: Any) -> Any:
        assert event.wait(WAIT_S)
        return forward(runner, step)

    monkeypatch.setattr(ModelRunner, "forward", held)
    return event


def row(tokens: list[int], start: int, blocks: list[int], name: str = "a", draw: Draw | None = GREEDY) -> Row:
    return make_row(name, tokens, start, blocks, draw)


def fed(*rows: Row) -> DecodeFed:
    return DecodeFed(rows, (GREEDY,) * len(rows))


def test_launching_waits_for_nothing(router: AsyncRouter, gate: Event) -> None:
    running = row([5], 4, [0, 1])
    tickets = [router.launch(Decode((running,))), router.launch(fed(running))]
    assert tickets[1] > tickets[0]
    gate.set()
    assert [router.await_result(ticket).ticket for ticket in tickets] == tickets


def test_rows_may_move_on_while_a_fed_step_runs(router: AsyncRouter, folder: Path, gate: Event) -> None:
    """What it computes was noted when it was launched."""
    running = Row(A, [0, 0, 0, 0, 5], 4, 5, [0, 1], GREEDY)
    first = router.launch(Decode((running,)))
    second = router.launch(fed(running))
    gate.set()
    (token,) = router.await_result(first).tokens
    running.known.append(token)  # type: ignore[attr-defined]
    running.start, running.end = 40, 41
    running.blocks.clear()  # type: ignore[attr-defined]
    sync = build_tiny(folder)
    sync.await_result(sync.launch(Decode((row([5], 4, [0, 1]),))))
    known = [0, 0, 0, 0, 5, token]
    expected = sync.await_result(sync.launch(Decode((Row(A, known, 5, 6, [0, 1], GREEDY),)))).tokens  # type: ignore[arg-type]
    assert router.await_result(second).tokens == expected
    sync.teardown()


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (fed(row([1], 0, [2], "c")), "c: fed, but the step in flight draws no token for it"),
        (fed(row([1], 0, [2], "b")), "b: fed, but the step in flight draws no token for it"),
        (fed(row([1, 2, 3], 1, [0])), "5 positions need 2 blocks"),
        (fed(row([1], 0, [99])), "block id 99"),
        (DecodeFed((row([1], 0, [2]),), ()), "1 rows with 0 draws"),
        (DecodeFed((row([1], 0, [2]),), (Draw(SamplingParams(top_p=7.0)),)), "out of range"),
    ],
)
def test_a_fed_step_that_can_not_be_is_refused_and_the_step_in_flight_goes_on(
    router: AsyncRouter, plan: DecodeFed, message: str
) -> None:
    ticket = router.launch(Prefill((row([1, 2], 0, [0]), row([3, 4], 0, [1], "b", None))))
    with pytest.raises(DeviceError, match=message) as caught:
        router.launch(plan)
    assert caught.value.fault is Fault.FORWARD
    assert isinstance(caught.value, KvExhausted) == ("blocks" in message)
    tokens = router.await_result(ticket).tokens
    assert (
        tokens == router.await_result(router.launch(Prefill((row([1, 2], 0, [0]), row([3], 0, [1], "b", None))))).tokens
    )


def test_a_fed_step_needs_one_in_flight(router: AsyncRouter) -> None:
    running = row([1], 0, [0])
    for _ in range(2):
        with pytest.raises(DeviceError, match="without a step in flight to feed it") as caught:
            router.launch(fed(running))
        assert caught.value.fault is Fault.FORWARD
        router.await_result(router.launch(Decode((running,))))


def test_a_step_is_fed_by_the_newest_only(router: AsyncRouter) -> None:
    first = router.launch(Prefill((row([1, 2], 0, [0]),)))
    newest = router.launch(Prefill((row([3], 0, [1], "b"),)))
    router.await_result(newest)
    with pytest.raises(DeviceError, match="without a step in flight to feed it"):
        router.launch(fed(row([1, 2], 0, [0])))
    router.await_result(first)


def test_reservations_are_those_of_the_newest_fed_step(router: AsyncRouter) -> None:
    running = row([5], 3, [0, 1])
    flying = router.launch(Decode((running,)))
    assert router.apply(ReserveKv(A, (BlockId(1),))) == Reserved((BlockId(1),))
    with pytest.raises(DeviceError, match="out of range"):
        router.launch(DecodeFed((running,), (Draw(SamplingParams(temperature=-1.0)),)))
    ahead = router.launch(fed(running))
    for ticket in (flying, ahead):
        router.await_result(ticket)
    assert router.apply(Rollback(A)) == Reserved((BlockId(1),))
    with pytest.raises(DeviceError, match="a: no fed step of it to roll back") as caught:
        router.apply(Rollback(A))
    assert caught.value.fault is Fault.EFFECT


def test_a_reservation_for_another_step_is_refused(router: AsyncRouter) -> None:
    running = row([5], 3, [0, 1])
    ticket = router.launch(Decode((running,)))
    router.apply(ReserveKv(A, (BlockId(0),)))
    with pytest.raises(DeviceError, match="not the last ones of its table"):
        router.launch(fed(running))
    router.await_result(ticket)
    router.await_result(router.launch(Decode((running,))))
    with pytest.raises(DeviceError, match="no fed step"):
        router.apply(Rollback(A))


def test_a_release_comes_after_the_steps_that_were_launched(
    router: AsyncRouter, gate: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    applied, apply = Event(), EffectApplier.apply

    def noting(self: EffectApplier, effect: Any) -> Any:
        if isinstance(effect, ReleaseSeq):
            applied.set()
        return apply(self, effect)

    monkeypatch.setattr(EffectApplier, "apply", noting)
    ticket = router.launch(Decode((row([5], 4, [0, 1]),)))
    assert router.apply(ReleaseSeq(A, 0, "over")) == Done()
    assert not applied.wait(0.05)
    gate.set()
    router.await_result(ticket)
    assert applied.wait(WAIT_S)


def test_quiesce_waits_for_all_that_was_launched(router: AsyncRouter) -> None:
    running = row([5], 4, [0, 1])
    tickets = [router.launch(Decode((running,))), router.launch(fed(running))]
    router.apply(Quiesce())
    assert all(router._in_flight[ticket].issued.future.done() for ticket in tickets)  # type: ignore[attr-defined]
    for ticket in tickets:
        router.await_result(ticket)


def test_a_forward_that_fails_is_told_where_it_is_awaited(router: AsyncRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    running = row([5], 4, [0, 1])
    with monkeypatch.context() as patch:
        patch.setattr("device.kv_pool.KvPool.write", fail)
        tickets = [router.launch(Decode((running,))), router.launch(fed(running))]
        for ticket, message in zip(tickets, ("out of memory", "the step that was to feed it failed"), strict=True):
            with pytest.raises(DeviceError, match=message) as caught:
                router.await_result(ticket)
            assert caught.value.fault is Fault.FORWARD
    router.await_result(router.launch(Decode((running,))))


def test_a_router_is_torn_down_with_steps_in_flight(folder: Path) -> None:
    router = AsyncRouter(build_tiny(folder))
    ticket = router.launch(Decode((row([5], 4, [0, 1]),)))
    router.teardown()
    for call in (
        lambda: router.launch(Decode((row([5], 4, [0, 1]),))),
        lambda: router.apply(Quiesce()),
        lambda: router.pool,
    ):
        with pytest.raises(DeviceError, match="torn down") as caught:
            call()
        assert caught.value.fault is Fault.EFFECT
    with pytest.raises(DeviceError, match="not in flight"):
        router.await_result(ticket)


def configured(folder: Path, **options: Any) -> DeviceConfig:
    return DeviceConfig(str(folder), "tiny", "cpu", "fp32", "torch", 4, 1 << 16, None, 1, **options)


def test_the_configuration_chooses_the_router(folder: Path) -> None:
    assert isinstance(build_router(configured(folder)), AsyncRouter)
    assert isinstance(build_router(configured(folder, router="async")), AsyncRouter)
    assert isinstance(build_router(configured(folder, router="sync")), SyncRouter)
    with pytest.raises(DeviceSetupError, match="no router 'fast'; choose one of: sync, async"):
        build_router(configured(folder, router="fast"))


def test_without_page_locked_memory_steps_run_one_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(_: Any) -> None:
        raise RuntimeError("no page-locked memory left")

    monkeypatch.setattr("device.build.AsyncRouter", none_left)
    assert isinstance(build_router(configured(folder)), SyncRouter)
