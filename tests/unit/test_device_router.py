"""The synchronous router's promises, on a tiny random model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rows import make_row
from tiny_model import build_tiny, save_tiny_model

from device.errors import DeviceSetupError
from device.kv_pool import KvPool
from device.router import SyncRouter
from scheduler.contract import Decode, DeviceError, Draw, Fault, Prefill, Row
from scheduler.effects import Done, Quiesce, Ticket
from scheduler.request import SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_model(path)
    return path


@pytest.fixture
def router(folder: Path) -> Iterator[SyncRouter]:
    built = build_tiny(folder)
    yield built
    built.teardown()


def row(tokens: list[int], start: int, blocks: list[int], name: str = "a", draws: bool = True) -> Row:
    return make_row(name, tokens, start, blocks, Draw(SamplingParams()) if draws else None)


def run(router: SyncRouter, *rows: Row) -> tuple[int | None, ...]:
    return router.await_result(router.launch(Prefill(rows))).tokens


def test_facts(router: SyncRouter) -> None:
    facts = router.facts()
    assert (facts.layers, facts.kv_heads, facts.head_dim, facts.vocab_size) == (2, 2, 4, 60)
    assert (facts.block_size, facts.total_blocks, facts.max_model_len) == (4, 12, 64)
    assert (facts.model, facts.device, facts.attention, facts.dtype) == ("tiny", "cpu", "torch", "fp32")
    assert facts.block_bytes == router.pool.block_bytes == router.pool.bytes_view().size // 12
    assert router.max_depth() == 1


def test_results_stand_where_their_rows_stand(router: SyncRouter) -> None:
    first, second = row([1, 2, 3], 0, [3]), row([9, 8], 0, [5], "b")
    silent = row([7, 7, 7], 0, [8], "c", draws=False)
    tokens = run(router, first, silent, second)
    assert tokens[1] is None
    assert (tokens[0], tokens[2]) == (run(router, first)[0], run(router, second)[0])


def test_a_step_without_draws_fills_the_cache(router: SyncRouter) -> None:
    whole = run(router, row([1, 2, 3, 4, 5], 0, [0, 1]))
    assert run(router, row([1, 2, 3, 4], 0, [2], draws=False)) == (None,)
    result = router.await_result(router.launch(Decode((row([5], 4, [2, 3]),))))
    assert result.tokens == whole


def test_a_ticket_settles_once(router: SyncRouter) -> None:
    ticket = router.launch(Prefill((row([1], 0, [0]),)))
    assert router.await_result(ticket).ticket == ticket
    with pytest.raises(DeviceError) as caught:
        router.await_result(ticket)
    assert caught.value.fault is Fault.EFFECT


def test_a_wrong_ticket_drops_the_held_result(router: SyncRouter) -> None:
    ticket = router.launch(Prefill((row([1], 0, [0]),)))
    for attempt in (Ticket(ticket + 1), ticket):
        with pytest.raises(DeviceError) as caught:
            router.await_result(attempt)
        assert caught.value.fault is Fault.EFFECT


def test_a_launch_replaces_an_unclaimed_result(router: SyncRouter) -> None:
    first = router.launch(Prefill((row([1], 0, [0]),)))
    second = router.launch(Prefill((row([1], 0, [0]),)))
    assert first != second
    assert router.await_result(second).ticket == second
    with pytest.raises(DeviceError):
        router.await_result(first)


def test_a_refused_plan_leaves_the_pool_alone(router: SyncRouter) -> None:
    with pytest.raises(DeviceError, match="block id 12") as caught:
        router.launch(Prefill((row([1, 2], 0, [1]), row([1, 2], 0, [12], "b"))))
    assert caught.value.fault is Fault.FORWARD
    assert not router.pool.tensor.any()


def test_a_failing_forward_is_a_forward_fault_and_the_router_goes_on(
    router: SyncRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    wanted = run(router, row([1, 2], 0, [0]))
    ticket = router.launch(Prefill((row([1, 2], 0, [0]),)))
    with monkeypatch.context() as patch:
        patch.setattr(KvPool, "write", fail)
        with pytest.raises(DeviceError, match="out of memory") as caught:
            router.launch(Prefill((row([3], 0, [1]),)))
    assert caught.value.fault is Fault.FORWARD
    with pytest.raises(DeviceError):
        router.await_result(ticket)
    assert run(router, row([1, 2], 0, [0])) == wanted


def test_an_overflow_does_not_spoil_the_next_owner_of_the_blocks(router: SyncRouter) -> None:
    def next_owner() -> tuple[int | None, ...]:
        run(router, row([1, 2], 0, [2], draws=False))
        return run(router, row([3], 2, [2]))

    wanted = next_owner()
    router.pool.tensor[2] = float("nan")
    with pytest.raises(DeviceError, match="a: its logits are not finite") as caught:
        run(router, row([5], 3, [2, 99]))
    assert caught.value.fault is Fault.READBACK
    assert next_owner() == wanted


def test_quiesce_and_unknown_effects(router: SyncRouter) -> None:
    assert router.apply(Quiesce()) == Done()
    with pytest.raises(DeviceError) as caught:
        router.apply("stop")  # type: ignore[arg-type]  # what a wrong caller would do
    assert caught.value.fault is Fault.EFFECT


def test_nothing_works_after_teardown(folder: Path) -> None:
    router = build_tiny(folder)
    router.teardown()
    with pytest.raises(DeviceError, match="torn down"):
        router.launch(Prefill((row([1], 0, [0]),)))
    with pytest.raises(DeviceError, match="torn down"):
        _ = router.pool
    with pytest.raises(DeviceError, match="torn down"):
        router.apply(Quiesce())
    router.teardown()


def test_the_pool_is_sized_by_its_budget(folder: Path) -> None:
    block_bytes = build_tiny(folder).facts().block_bytes
    sized = build_tiny(folder, total_blocks=None, kv_bytes=7 * block_bytes + 5)
    assert sized.facts().total_blocks == 7


@pytest.mark.parametrize("dtype", ["auto", "bf16"])
def test_bf16_halves_the_blocks(folder: Path, dtype: str) -> None:
    router = build_tiny(folder, dtype=dtype)
    assert router.facts().dtype == "bf16"
    assert router.facts().block_bytes * 2 == build_tiny(folder).facts().block_bytes
    assert run(router, row([1, 2, 3], 0, [3]), row([5], 0, [2], "b", draws=False))[1] is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "cuda:99"}, "device 'cuda:99' cannot be used"),
        ({"device": "abacus"}, "device 'abacus' cannot be used"),
        ({"dtype": "fp7"}, "no dtype 'fp7'"),
        ({"attention": "none"}, "no attention back end 'none'"),
        ({"max_model_len": 65}, "1 to 64 positions"),
        ({"max_model_len": 0}, "1 to 64 positions"),
        ({"total_blocks": None, "kv_bytes": 1}, "holds no block"),
        ({"total_blocks": 0}, "at least 1"),
        ({"block_size": 0}, "at least 1"),
        ({"total_blocks": 1 << 50}, "do not fit"),
    ],
)
def test_settings_that_cannot_be_met(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DeviceSetupError, match=message):
        build_tiny(folder, **changes)
