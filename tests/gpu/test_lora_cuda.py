"""Adapters on CUDA: the tokens of a CPU, base rows untouched, memory given back."""

from pathlib import Path

import pytest
import torch
from rows import make_row
from tiny_adapter import save_tiny_adapter
from tiny_model import build_tiny, save_tiny_model

from device.router import SyncRouter
from scheduler.adapters import LoadAdapter, UnloadAdapter
from scheduler.contract import Draw, Prefill
from scheduler.request import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

MIXED = ("a", None, "b", "a", None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_model(path)
    for seed, name in enumerate("ab"):
        save_tiny_adapter(path / name, seed)
    return path


def build(folder: Path, device: str, dtype: str = "fp32") -> SyncRouter:
    router = build_tiny(folder, device=device, dtype=dtype)
    for name in "ab":
        router.lora(LoadAdapter(name, str(folder / name)))
    return router


def tokens_of(router: SyncRouter, adapters: tuple[str | None, ...]) -> list[list[int]]:
    """Prompts of 1, 2, ... tokens, then decode, all rows in every step."""
    known = [[7 + i] * (i + 1) for i in range(len(adapters))]
    starts, drawn = [0] * len(adapters), [[] for _ in adapters]  # type: list[int], list[list[int]]
    for _ in range(4):
        rows = []
        for i, adapter in enumerate(adapters):
            blocks = [2 * i, 2 * i + 1]
            row = make_row(
                f"r{i}", known[i][starts[i] :], starts[i], blocks, Draw(SamplingParams()), known[i][: starts[i]]
            )
            row.adapter = adapter
            rows.append(row)
        for i, token in enumerate(router.await_result(router.launch(Prefill(tuple(rows)))).tokens):
            assert token is not None
            starts[i] = len(known[i])
            known[i].append(token)
            drawn[i].append(token)
    return drawn


def test_tokens_equal_those_of_a_cpu(folder: Path) -> None:
    on_cuda = tokens_of(build(folder, "cuda"), MIXED)
    assert on_cuda == tokens_of(build(folder, "cpu"), MIXED)
    assert on_cuda != tokens_of(build(folder, "cuda"), (None,) * 5)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_base_rows_do_not_change(folder: Path, dtype: str) -> None:
    router = build(folder, "cuda", dtype)
    base, mixed = tokens_of(router, (None,) * 5), tokens_of(router, MIXED)
    assert [mixed[i] for i in (1, 4)] == [base[i] for i in (1, 4)]


def test_unloading_frees_the_memory(folder: Path) -> None:
    router = build_tiny(folder, device="cuda")
    before = torch.cuda.memory_allocated()
    router.lora(LoadAdapter("a", str(folder / "a")))
    assert torch.cuda.memory_allocated() > before
    router.lora(UnloadAdapter("a"))
    assert torch.cuda.memory_allocated() == before
