"""The same answers on CUDA as on a CPU, and a pool that a transport can register."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from device.router import SyncRouter, build_sync_router
from scheduler.contract import Decode, Draw, Prefill, Row
from scheduler.effects import NO_SLOT, CopyBlocks, Quiesce, RestoreSequenceState, Saved, SaveSequenceState
from scheduler.ids import BlockId, RequestId
from scheduler.request import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

VOCABULARY, BLOCK_SIZE, TOTAL_BLOCKS, NEW_TOKENS = 199, 16, 64, 12
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 384,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "mistral-sliding": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=9)),
}


@pytest.fixture(scope="module", params=list(MODELS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(7)
    path = tmp_path_factory.mktemp(str(request.param))
    MODELS[request.param]().float().save_pretrained(path)
    return path


def build(folder: Path, device: str, dtype: str = "fp32") -> SyncRouter:
    return build_sync_router(folder, "tiny", device, dtype, "torch", BLOCK_SIZE, None, TOTAL_BLOCKS, None, slots=3)


def tokens_of(router: SyncRouter, params: SamplingParams) -> list[list[int]]:
    """Five prompts in two chunks each, the second chunks beside decode rows, then decode together."""
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in (2, 17, 40, 64, 90)]
    free = rng.sample(range(TOTAL_BLOCKS), TOTAL_BLOCKS)
    tables = [[free.pop() for _ in range(-(-(len(p) + NEW_TOKENS) // BLOCK_SIZE))] for p in prompts]
    tokens = [list(prompt) for prompt in prompts]

    def row(i: int, first: int, last: int) -> Row:
        draw = Draw(params) if last == len(tokens[i]) else None
        slot = i if i < router.facts().slots else NO_SLOT
        return Row(RequestId(f"r{i}"), tokens[i], first, last, tables[i], draw, slot, prompt_tokens=len(prompts[i]))

    def step(plan: Prefill | Decode, numbers: list[int]) -> None:
        for i, token in zip(numbers, router.await_result(router.launch(plan)).tokens, strict=True):
            if token is not None:
                tokens[i].append(token)

    for i, prompt in enumerate(prompts):
        half = len(prompt) // 2
        step(Prefill((row(i, 0, half),)), [i])
        running = [j for j in range(i) if len(tokens[j]) < len(prompts[j]) + NEW_TOKENS]
        rows = (row(i, half, len(prompt)), *(row(j, len(tokens[j]) - 1, len(tokens[j])) for j in running))
        step(Prefill(rows), [i, *running])
    while running := [i for i in range(5) if len(tokens[i]) < len(prompts[i]) + NEW_TOKENS]:
        step(Decode(tuple(row(i, len(tokens[i]) - 1, len(tokens[i])) for i in running)), running)
    return [own[len(prompt) :] for own, prompt in zip(tokens, prompts, strict=True)]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.8, top_p=0.9, top_k=20, seed=3),
        SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4),
        SamplingParams(temperature=0.8, seed=3, frequency_penalty=1.0),
    ],
)
def test_tokens_equal_those_of_a_cpu(folder: Path, params: SamplingParams) -> None:
    assert tokens_of(build(folder, "cuda"), params) == tokens_of(build(folder, "cpu"), params)


def test_bf16_runs(folder: Path) -> None:
    router = build(folder, "cuda:0", "bf16")
    assert all(len(own) == NEW_TOKENS for own in tokens_of(router, SamplingParams()))
    router.apply(Quiesce())
    assert router.facts().device == "cuda:0"


def test_the_pool_is_flat_device_bytes(folder: Path) -> None:
    router = build(folder, "cuda")
    memory, size = router.pool.bytes_view(), router.facts().block_bytes
    interface = memory.__cuda_array_interface__
    assert interface["typestr"] == "|u1"
    assert interface["shape"] == (TOTAL_BLOCKS * size,)
    assert interface["data"][0] == router.pool.tensor.data_ptr()
    router.pool.tensor[3] = 1.0
    assert memory.nonzero().min() >= 3 * size
    assert memory.nonzero().max() < 4 * size


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("where", ["host", "disk"])
def test_a_spilled_sequence_goes_on_in_other_blocks(folder: Path, tmp_path: Path, where: str, dtype: str) -> None:
    """Without a Quiesce anywhere: a save follows the step that wrote the blocks, a step follows the restore."""
    router = build_sync_router(
        folder, "tiny", "cuda", dtype, "torch", BLOCK_SIZE, None, TOTAL_BLOCKS, None, 1 << 24,
        tmp_path if where == "disk" else None,
    )  # fmt: skip
    rng = random.Random(2)
    tokens = [rng.randrange(VOCABULARY) for _ in range(88)]
    order = [BlockId(block) for block in rng.sample(range(TOTAL_BLOCKS), 18)]
    used, moved, copied = tuple(order[:6]), tuple(order[6:12]), tuple(order[12:])
    name, draw = RequestId("a"), Draw(SamplingParams())

    def prefill(known: list[int]) -> None:
        router.await_result(router.launch(Prefill((Row(name, known, 0, 87, used, None),))))

    def decode(blocks: tuple[BlockId, ...]) -> tuple[int | None, ...]:
        return router.await_result(router.launch(Decode((Row(name, tokens, 87, 88, blocks, draw),)))).tokens

    prefill(tokens)
    wanted = decode(used)
    prefill(tokens)
    content = router.pool.tensor[list(used)].clone()
    assert isinstance(router.apply(SaveSequenceState(name, used, 87)), Saved)
    prefill(tokens[::-1])
    router.apply(RestoreSequenceState(name, moved, 87))
    assert torch.equal(router.pool.tensor[list(moved)], content)
    router.apply(CopyBlocks(tuple(zip(moved, copied, strict=True))))
    assert torch.equal(router.pool.tensor[list(copied)], content)
    assert decode(moved) == decode(copied) == wanted
    router.teardown()
    assert not list(tmp_path.iterdir())


def test_teardown_frees_the_memory(folder: Path) -> None:
    before = torch.cuda.memory_allocated()
    router = build(folder, "cuda")
    assert torch.cuda.memory_allocated() > before
    router.teardown()
    assert torch.cuda.memory_allocated() <= before
