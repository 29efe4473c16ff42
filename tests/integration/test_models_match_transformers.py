"""Our router draws the tokens that `transformers.generate` draws, however a request is cut, scattered and batched."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from driven import Driven, run_mixed
from reference import generate
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from device.errors import ModelError
from device.models import default_home, resolve_model
from device.router import SyncRouter, build_sync_router
from scheduler.contract import Prefill
from scheduler.request import SamplingParams

BLOCK_SIZE = 4
TOTAL_BLOCKS = 64
VOCABULARY = 199
NEW_TOKENS = 12
GREEDY = SamplingParams()

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
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama-wide-heads": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=32, attention_bias=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen2-sliding": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=6, max_window_layers=1)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    ),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=3.0, attention_multiplier=0.2)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SIZES, head_dim=8, sliding_window=6, layer_types=["sliding_attention", *["full_attention"] * 2]
        )
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)),
    "mistral-sliding": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5)),
}


def make_sequences(prompts: list[list[int]], new_tokens: int, rng: random.Random, facts: Any) -> list[Driven]:
    """Sequences whose blocks lie scattered over the pool."""
    free = rng.sample(range(facts.total_blocks), facts.total_blocks)
    sequences = []
    for number, prompt in enumerate(prompts):
        wanted = -(-(len(prompt) + new_tokens) // facts.block_size)
        blocks, free = free[:wanted], free[wanted:]
        sequences.append(Driven(f"r{number}", prompt, blocks))
    return sequences


@pytest.fixture(scope="module", params=list(MODELS))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(7)
    folder = tmp_path_factory.mktemp(str(request.param))
    MODELS[request.param]().float().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def reference(saved: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32, attn_implementation="eager")


@pytest.fixture
def router(saved: Path) -> Iterator[SyncRouter]:
    built = build_sync_router(saved, "tiny", "cpu", "fp32", "torch", BLOCK_SIZE, None, TOTAL_BLOCKS, None)
    yield built
    built.teardown()


@pytest.mark.parametrize("seed", range(3))
def test_greedy_tokens_equal_generate(router: SyncRouter, reference: Any, seed: int) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in (1, 4, 13, 23, 30)]
    sequences = make_sequences(prompts, NEW_TOKENS, rng, router.facts())
    run_mixed(router, sequences, NEW_TOKENS, rng)
    assert [s.drawn for s in sequences] == [generate(reference, [prompt], NEW_TOKENS)[0] for prompt in prompts]


@pytest.mark.parametrize("chunks", [[29], [8, 8, 8, 5], [1, 1, 27], [28, 1], [3, 17, 9]])
def test_prefilled_logits_are_close_to_transformers(
    router: SyncRouter, reference: Any, chunks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits: list[torch.Tensor] = []

    def keep(given: torch.Tensor, drawn: Any, *_: Any) -> torch.Tensor:
        logits.append(given.clone())
        return torch.zeros(len(drawn), dtype=torch.int64)

    monkeypatch.setattr("device.model_runner.draw_ids", keep)
    monkeypatch.setattr("device.torch_attention.TILE", 7)  # several tiles per chunk
    rng = random.Random(5)
    prompt = [rng.randrange(VOCABULARY) for _ in range(sum(chunks))]
    (sequence,) = make_sequences([prompt], 1, rng, router.facts())
    for count in chunks:
        result = router.await_result(router.launch(Prefill((sequence.row(count),))))
        sequence.settle(count, result.tokens[0])
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0, -1]
    torch.testing.assert_close(logits[-1][0], expected, rtol=1e-4, atol=1e-4)


def test_a_block_copied_elsewhere_serves_as_well(router: SyncRouter, reference: Any) -> None:
    """What a handoff does: the bytes of a block are all there is to it."""
    rng = random.Random(3)
    prompt = [rng.randrange(VOCABULARY) for _ in range(18)]
    (sequence,) = make_sequences([prompt], NEW_TOKENS, rng, router.facts())
    router.await_result(router.launch(Prefill((sequence.row(18),))))
    size, memory = router.facts().block_bytes, router.pool.bytes_view()
    moved = [block for block in range(TOTAL_BLOCKS) if block not in sequence.blocks][: len(sequence.blocks)]
    for old, new in zip(sequence.blocks, moved, strict=True):
        memory[new * size : (new + 1) * size] = memory[old * size : (old + 1) * size]
        memory[old * size : (old + 1) * size] = 0
    (expected,) = generate(reference, [prompt], NEW_TOKENS)
    sequence.blocks = moved
    sequence.settle(18, expected[0])
    run_mixed(router, [sequence], NEW_TOKENS, rng)
    assert sequence.drawn == expected


@pytest.fixture(scope="module")
def smollm2() -> Path:
    try:
        return resolve_model("smollm2", default_home(), lambda _: None).path
    except ModelError as error:
        pytest.skip(f"smollm2 cannot be fetched here: {error}")


def test_smollm2_equals_generate(smollm2: Path) -> None:
    config = PreTrainedConfig.from_pretrained(smollm2)
    assert config.model_type == "llama"
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    texts = ["The capital of France is", "def fibonacci(n):\n", "Once upon a time there was a small boat that"]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    router = build_sync_router(smollm2, "smollm2", "cpu", "fp32", "torch", 16, None, TOTAL_BLOCKS, None)
    rng = random.Random(1)
    sequences = make_sequences(prompts, 16, rng, router.facts())
    run_mixed(router, sequences, 16, rng)
    assert [s.drawn for s in sequences] == [generate(model, [prompt], 16)[0] for prompt in prompts]
    assert "Paris" in tokenizer.decode(sequences[0].drawn)
