"""Our router draws with an adapter what the peft library draws with it, alone and in mixed company."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from reference import generate
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from device.router import SyncRouter, build_sync_router
from scheduler.adapters import LoadAdapter
from scheduler.contract import Decode, Draw, Prefill, Row
from scheduler.ids import RequestId
from scheduler.request import SamplingParams

BLOCK_SIZE, TOTAL_BLOCKS, VOCABULARY, NEW_TOKENS = 4, 80, 199, 10
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # wide, so that greedy choices are not near ties
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),
}
ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "attention": {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION},
    "mlp": {
        "r": 8, "lora_alpha": 5, "use_rslora": True, "target_modules": MLP,
        "rank_pattern": {r"layers\.1\..*": 3, "up_proj": 6}, "alpha_pattern": {"1.mlp.down_proj": 12},
    },
    "pattern": {"r": 2, "lora_alpha": 6, "target_modules": r".*layers\.[02]\..*\.(q_proj|o_proj|down_proj)"},
    "layers": {
        "r": 4, "lora_alpha": 16, "target_modules": [*ATTENTION, "model.layers.0.mlp.up_proj"],
        "layers_to_transform": [1, 2], "layers_pattern": "layers", "exclude_modules": ["2.self_attn.v_proj"],
    },
    "all": {"r": 3, "lora_alpha": 4, "target_modules": "all-linear"},
    "head": {"r": 4, "lora_alpha": 8, "target_modules": ["lm_head", "v_proj"]},
}  # fmt: skip


@dataclass
class Sequence:
    name: str
    adapter: str | None
    tokens: list[int]
    blocks: list[int]
    computed: int = 0
    drawn: list[int] = field(default_factory=list)

    def row(self, count: int) -> Row:
        end = self.computed + count
        draw = Draw(SamplingParams()) if end == len(self.tokens) else None
        return Row(RequestId(self.name), self.tokens, self.computed, end, self.blocks, draw, adapter=self.adapter)

    def settle(self, count: int, token: int | None) -> None:
        self.computed += count
        if token is not None:
            self.tokens.append(token)
            self.drawn.append(token)


def answers(router: SyncRouter, adapters: list[str | None], prompts: list[list[int]], seed: int) -> list[list[int]]:
    """What each prompt gets under its adapter, driven in chunks of random size and in random company."""
    rng = random.Random(seed)
    free = rng.sample(range(TOTAL_BLOCKS), TOTAL_BLOCKS)
    sequences = []
    for i, (adapter, prompt) in enumerate(zip(adapters, prompts, strict=True)):
        blocks = [free.pop() for _ in range(-(-(len(prompt) + NEW_TOKENS) // BLOCK_SIZE))]
        sequences.append(Sequence(f"r{i}", adapter, list(prompt), blocks))
    while unfinished := [s for s in sequences if len(s.drawn) < NEW_TOKENS]:
        company = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        counts = [rng.randint(1, len(s.tokens) - s.computed) for s in company]
        rows = tuple(s.row(count) for s, count in zip(company, counts, strict=True))
        is_decode = all(s.drawn for s in company)
        result = router.await_result(router.launch(Decode(rows) if is_decode else Prefill(rows)))
        for sequence, count, token in zip(company, counts, result.tokens, strict=True):
            sequence.settle(count, token)
    return [s.drawn for s in sequences]


@pytest.fixture(scope="module", params=list(MODELS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and in it one folder per adapter, written by peft."""
    torch.manual_seed(7)
    path = tmp_path_factory.mktemp(str(request.param))
    MODELS[request.param]().float().save_pretrained(path)
    for name, settings in ADAPTERS.items():
        config = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **settings)
        get_peft_model(base_model(path), config).save_pretrained(path / name, save_embedding_layers=False)
    return path


def base_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(11)
    return [[rng.randrange(VOCABULARY) for _ in range(length)] for length in (1, 5, 14, 22)]


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> dict[str | None, list[list[int]]]:
    """By adapter, with the adapter beside the weights and merged into them: both must agree before we compare."""
    wanted: dict[str | None, list[list[int]]] = {
        None: [generate(base_model(folder), [prompt], NEW_TOKENS)[0] for prompt in prompts]
    }
    for name in ADAPTERS:
        model = PeftModel.from_pretrained(base_model(folder), folder / name)
        beside = [generate(model, [prompt], NEW_TOKENS)[0] for prompt in prompts]
        merged = model.merge_and_unload()
        assert [generate(merged, [prompt], NEW_TOKENS)[0] for prompt in prompts] == beside
        wanted[name] = beside
    assert len({str(tokens) for tokens in wanted.values()}) == len(wanted)
    return wanted


@pytest.fixture
def router(folder: Path) -> Iterator[SyncRouter]:
    built = build_sync_router(folder, "tiny", "cpu", "fp32", "torch", BLOCK_SIZE, None, TOTAL_BLOCKS, None)
    yield built
    built.teardown()


@pytest.mark.parametrize("name", list(ADAPTERS))
def test_each_adapter_alone(
    router: SyncRouter, folder: Path, prompts: list[list[int]], expected: dict[str | None, list[list[int]]], name: str
) -> None:
    router.lora(LoadAdapter(name, str(folder / name)))
    assert answers(router, [name] * len(prompts), prompts, seed=1) == expected[name]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("names", [("attention", "mlp"), ("pattern", "head"), ("all", "layers"), tuple(ADAPTERS)])
def test_adapters_and_the_base_model_in_one_batch(
    router: SyncRouter,
    folder: Path,
    prompts: list[list[int]],
    expected: dict[str | None, list[list[int]]],
    names: tuple[str, ...],
    seed: int,
) -> None:
    for name in names:
        router.lora(LoadAdapter(name, str(folder / name)))
    rng = random.Random(seed)
    wanted: list[tuple[str | None, int]] = [(name, rng.randrange(len(prompts))) for name in (None, *names)]
    wanted += [(rng.choice([None, *names]), rng.randrange(len(prompts))) for _ in range(3)]
    rng.shuffle(wanted)
    drawn = answers(router, [name for name, _ in wanted], [prompts[i] for _, i in wanted], seed)
    assert drawn == [expected[name][i] for name, i in wanted]


def test_facts_are_those_of_peft(router: SyncRouter, folder: Path) -> None:
    for name in ADAPTERS:
        table = router.lora(LoadAdapter(name, str(folder / name)))
    facts = {own.name: own for own in table}
    assert {name: own.rank for name, own in facts.items()} == {
        "all": 3, "attention": 4, "head": 4, "layers": 4, "mlp": 8, "pattern": 2,
    }  # fmt: skip
    assert facts["layers"].target_modules == ("k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    assert len({own.digest for own in table}) == len(ADAPTERS)
