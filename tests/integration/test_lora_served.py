"""An adapter through the whole of a real cluster: loaded over HTTP, named by requests, right to the token, unloaded.

Real processes and UCX, a small random model in fp32, and `peft` beside `transformers` as the reference.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from load import body, complete_all
from peft import PeftModel
from reference import generate
from served import Served, serve, wait_until
from stand_ins import byte_level_tokenizer
from tiny_adapter import save_adapter, tensors_of
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

HIDDEN, KV_SIZE, LAYERS = 32, 16, 2
NEW_TOKENS = 24
PROMPTS = [tuple((i * 37 + j * j * 11 + j) % 256 for j in range(length)) for i, length in enumerate((1, 8, 21, 40))]
SHAPES = {"q_proj": (HIDDEN, HIDDEN), "v_proj": (HIDDEN, KV_SIZE)}
Answers = dict[str | None, list[list[int]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer, and in it the adapters "sql" and "poems"."""
    path = tmp_path_factory.mktemp("models") / "small"
    tokenizer = byte_level_tokenizer(["a small corpus of words"])
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).float().save_pretrained(path)
    tokenizer.save_pretrained(path)
    linears = {f"model.layers.{i}.self_attn.{name}": shape for i in range(LAYERS) for name, shape in SHAPES.items()}
    for seed, name in enumerate(("sql", "poems")):
        save_adapter(path / name, tensors_of(linears, 2, seed))
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> Answers:
    def base() -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")

    models = {None: base(), **{name: PeftModel.from_pretrained(base(), folder / name) for name in ("sql", "poems")}}
    answers = {name: [generate(model, [prompt], NEW_TOKENS)[0] for prompt in PROMPTS] for name, model in models.items()}
    assert len({str(tokens) for tokens in answers.values()}) == len(answers)
    return answers


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("home")
    with serve(
        home, {"model": str(folder), "dtype": "fp32", "prefill": {"kv_mib": 8}, "decode": {"kv_mib": 8}}
    ) as served:
        yield served


def post(served: Served, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{served.url}/v1/{path}", json=fields, timeout=60, trust_env=False)


def load(served: Served, folder: Path, name: str) -> httpx.Response:
    return post(served, "load_lora_adapter", lora_name=name, lora_path=str(folder / name))


def ask(served: Served, model: str | None) -> list[list[int]]:
    """All prompts at once, under an adapter or the base model."""
    completions = complete_all(served.url, PROMPTS, NEW_TOKENS, len(PROMPTS), model=model or "small")
    return [completion.tokens for completion in asyncio.run(completions)]


def models(served: Served) -> list[str]:
    listed = httpx.get(f"{served.url}/v1/models", timeout=60, trust_env=False).json()
    return [card["id"] for card in listed["data"]]


def test_an_adapter_is_served_from_its_load_to_its_unload(served: Served, folder: Path, expected: Answers) -> None:
    assert ask(served, None) == expected[None]
    assert load(served, folder, "sql").status_code == 200
    assert models(served) == ["small", "sql"]
    assert ask(served, "sql") == expected["sql"], "the base model's cached prefixes must not serve it"
    assert ask(served, None) == expected[None]
    assert post(served, "unload_lora_adapter", lora_name="sql").status_code == 200
    assert models(served) == ["small"]
    gone = post(served, "completions", **body(PROMPTS[0], 4, model="sql"))
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
    assert ask(served, None) == expected[None]
    wait_until(lambda: served.owned_blocks() == 0, 5)


def test_what_runs_keeps_its_adapter_while_another_is_loaded(served: Served, folder: Path, expected: Answers) -> None:
    """And requests under both adapters and none run beside each other."""
    assert load(served, folder, "sql").status_code == 200

    async def mixed() -> tuple[Any, ...]:
        async with httpx.AsyncClient(base_url=served.url, timeout=60, trust_env=False) as client:
            running = asyncio.create_task(complete_all(served.url, PROMPTS, NEW_TOKENS, 4, model="sql"))
            await asyncio.sleep(0.01)
            fields = {"lora_name": "poems", "lora_path": str(folder / "poems")}
            loading = await client.post("/v1/load_lora_adapter", json=fields)
            assert loading.status_code == 200, loading.text
            names = ("sql", "poems", "small")
            later = [complete_all(served.url, PROMPTS, NEW_TOKENS, 4, model=name) for name in names]
            return await asyncio.gather(running, *later)

    answers = [[completion.tokens for completion in of_one] for of_one in asyncio.run(mixed())]
    assert answers == [expected[name] for name in ("sql", "sql", "poems", None)]
    for name in ("sql", "poems"):
        assert post(served, "unload_lora_adapter", lora_name=name).status_code == 200
    counters = [node["counters"] for node in served.status()["nodes"]]
    assert [one["failed_steps"] + one["failed_effects"] for one in counters] == [0, 0]


def test_an_adapter_that_is_none_is_refused_and_nothing_is_left(
    served: Served, folder: Path, expected: Answers
) -> None:
    refused = post(served, "load_lora_adapter", lora_name="broken", lora_path=str(folder / "nothing-there"))
    assert refused.status_code == 400
    assert "nothing-there" in refused.json()["error"]["message"]
    assert models(served) == ["small"]
    assert ask(served, None) == expected[None]
