"""Adapters of hybrid models, also inside recurrent layers, which see rows in another order and in several calls."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from reference import generate
from tiny_hybrids import VOCABULARY, build_hybrid, save_hybrid
from transformers import AutoModelForCausalLM

from device.router import SyncRouter
from scheduler.adapters import LoadAdapter
from scheduler.contract import Decode, Draw, Prefill, Row
from scheduler.ids import RequestId
from scheduler.request import SamplingParams

NEW_TOKENS = 6
INSIDE = {"bamba": ["in_proj", "out_proj"], "qwen3-next": ["in_proj_qkvz", "in_proj_ba", "out_proj"]}
BESIDE = {"bamba": ["q_proj", "down_proj"], "qwen3-next": ["q_proj", "o_proj", "shared_expert_gate"]}
CASES = [(3, "inside"), (9, None), (1, "beside"), (6, "inside"), (12, "beside"), (2, "inside")]
"""Lengths of prompts, and under which adapter each runs; the slots are handed out backwards."""


@pytest.fixture(scope="module", params=list(INSIDE))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(str(request.param))
    save_hybrid(request.param, path)
    for name, targets in (("inside", INSIDE), ("beside", BESIDE)):
        torch.manual_seed(len(name))
        config = LoraConfig(r=4, lora_alpha=8, target_modules=targets[request.param], init_lora_weights=False)
        get_peft_model(base_model(path), config).save_pretrained(path / name)
    return path


def base_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(VOCABULARY) for _ in range(length)] for length, _ in CASES]


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    models = {name: PeftModel.from_pretrained(base_model(folder), folder / name) for name in ("inside", "beside")}
    models[None] = base_model(folder)
    return [
        generate(models[adapter], [prompt], NEW_TOKENS)[0] for prompt, (_, adapter) in zip(prompts, CASES, strict=True)
    ]


@pytest.fixture
def router(folder: Path) -> Iterator[SyncRouter]:
    built = build_hybrid(folder)
    for name in ("inside", "beside"):
        built.lora(LoadAdapter(name, str(folder / name)))
    yield built
    built.teardown()


@pytest.mark.parametrize("seed", range(3))
def test_mixed_rows_draw_what_peft_draws(
    router: SyncRouter, prompts: list[list[int]], expected: list[list[int]], seed: int
) -> None:
    rng = random.Random(seed)
    known, computed = [list(prompt) for prompt in prompts], [0] * len(CASES)
    while unfinished := [i for i, own in enumerate(known) if len(own) < len(prompts[i]) + NEW_TOKENS]:
        company = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        ends = [computed[i] + rng.randint(1, len(known[i]) - computed[i]) for i in company]
        rows = tuple(row(i, known[i], computed[i], end) for i, end in zip(company, ends, strict=True))
        is_decode = all(own.count == 1 for own in rows)
        tokens = router.await_result(router.launch(Decode(rows) if is_decode else Prefill(rows))).tokens
        for i, end, token in zip(company, ends, tokens, strict=True):
            computed[i] = end
            known[i] += [] if token is None else [token]
    assert [own[len(prompt) :] for own, prompt in zip(known, prompts, strict=True)] == expected


def row(i: int, known: list[int], start: int, end: int) -> Row:
    draw = Draw(SamplingParams()) if end == len(known) else None
    blocks, slot = list(range(6 * i, 6 * i + 6)), len(CASES) - 1 - i
    return Row(RequestId(f"r{i}"), known, start, end, blocks, draw, slot, CASES[i][1])
