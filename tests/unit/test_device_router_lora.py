"""Adapters through the router, on the tiny random model."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rows import make_row
from tiny_adapter import save_tiny_adapter
from tiny_model import build_tiny, save_tiny_model
from torch import Tensor

from device.model_runner import ModelRunner, StepInput
from device.router import SyncRouter
from scheduler.adapters import AdapterRefused, ListAdapters, LoadAdapter, UnloadAdapter
from scheduler.contract import DeviceError, Draw, Fault, Prefill, Row
from scheduler.request import SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_model(path)
    for seed, name in enumerate("ab"):
        save_tiny_adapter(path / name, seed)
    return path


@pytest.fixture
def router(folder: Path) -> Iterator[SyncRouter]:
    built = build_tiny(folder)
    yield built
    built.teardown()


@pytest.fixture
def logits(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Of each step, in order."""
    kept: list[Tensor] = []
    forward = ModelRunner.forward

    def keep(runner: ModelRunner, step: StepInput) -> Tensor:
        kept.append(forward(runner, step).clone())
        return kept[-1]

    monkeypatch.setattr(ModelRunner, "forward", keep)
    return kept


def row(name: str, tokens: list[int], start: int, block: int, adapter: str | None) -> Row:
    made = make_row(name, tokens, start, [block], Draw(SamplingParams()))
    made.adapter = adapter
    return made


def run(router: SyncRouter, *adapters: str | None) -> None:
    """A prefill of three tokens and a decode for one row per adapter, the rows of all in one step."""
    for start, tokens in ((0, [5, 9, 2]), (3, [7])):
        rows = [row(f"r{i}", [t + i for t in tokens], start, i, adapter) for i, adapter in enumerate(adapters)]
        router.await_result(router.launch(Prefill(tuple(rows))))


def load(router: SyncRouter, folder: Path, *names: str) -> None:
    for name in names:
        router.lora(LoadAdapter(name, str(folder / name)))


def test_base_rows_are_bitwise_the_same(router: SyncRouter, folder: Path, logits: list[Tensor]) -> None:
    run(router, None, None, None, None)
    load(router, folder, "a", "b")
    run(router, None, None, None, None)
    run(router, None, "a", None, "b")
    run(router, "a", "b", None, "a")
    before, loaded, mixed, other = (torch.stack(logits[i : i + 2]) for i in (0, 2, 4, 6))
    assert torch.equal(loaded, before)
    assert torch.equal(mixed[:, [0, 2]], before[:, [0, 2]])
    assert torch.equal(other[:, 2], before[:, 2])
    for step, i in ((s, i) for s in (0, 1) for i in (0, 1, 3)):
        assert not torch.allclose(other[step, i], before[step, i])


def test_company_does_not_matter(router: SyncRouter, folder: Path, logits: list[Tensor]) -> None:
    load(router, folder, "a", "b")
    for adapters in (("a",), ("a", "b", "a"), ("a", None, "b")):
        run(router, *adapters)
    for step in (0, 1):
        for company in (2, 4):
            torch.testing.assert_close(logits[company + step][0], logits[step][0], rtol=1e-5, atol=1e-5)


def test_an_unloaded_adapter_is_gone(router: SyncRouter, folder: Path, logits: list[Tensor]) -> None:
    run(router, None)
    load(router, folder, "a")
    run(router, "a")
    router.lora(UnloadAdapter("a"))
    assert router.lora(ListAdapters()) == ()
    run(router, None)
    assert torch.equal(logits[4], logits[0])
    assert not torch.allclose(logits[2], logits[0])
    with pytest.raises(DeviceError, match="adapter 'a' is not loaded") as caught:
        run(router, None, "a")
    assert caught.value.fault is Fault.FORWARD
    assert len(logits) == 6


def test_a_step_with_an_unknown_adapter_touches_nothing(router: SyncRouter, folder: Path) -> None:
    load(router, folder, "a")
    with pytest.raises(DeviceError, match="adapter 'x' is not loaded; loaded: a"):
        run(router, "a", "x")
    assert not router.pool.tensor.any()


def test_refusals_and_teardown(folder: Path) -> None:
    router = build_tiny(folder)
    with pytest.raises(AdapterRefused, match="no folder"):
        router.lora(LoadAdapter("a", str(folder / "absent")))
    router.teardown()
    with pytest.raises(DeviceError, match="torn down"):
        router.lora(ListAdapters())


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_adapters_count_in_every_dtype(folder: Path, dtype: str, logits: list[Tensor]) -> None:
    router = build_tiny(folder, dtype=dtype)
    run(router, None, None)
    load(router, folder, "a", "b")
    run(router, None, "a")
    assert torch.equal(logits[2][0], logits[0][0])
    assert not torch.allclose(logits[2][1], logits[0][1], atol=0.1)
