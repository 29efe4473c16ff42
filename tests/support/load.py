"""Many completions at once against a running server, with token ids in and out."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Completion:
    """tokens: the sampled ids; cached: prompt tokens that came from the prefill node's prefix cache."""

    tokens: list[int]
    cached: int
    finish_reason: str


def body(prompt: Sequence[int], max_tokens: int, **options: Any) -> dict[str, Any]:
    """A greedy completion of exactly `max_tokens` tokens that returns token ids."""
    return {
        "model": "smollm2",
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **options,
    }


async def complete(client: httpx.AsyncClient, prompt: Sequence[int], max_tokens: int, **options: Any) -> Completion:
    response = await client.post("/v1/completions", json=body(prompt, max_tokens, **options))
    assert response.status_code == 200, response.text
    answer = response.json()
    details = answer["usage"].get("prompt_tokens_details") or {}
    choice = answer["choices"][0]
    return Completion(choice["token_ids"], details.get("cached_tokens", 0), choice["finish_reason"])


async def complete_all(
    url: str, prompts: Sequence[Sequence[int]], max_tokens: int, at_once: int, **options: Any
) -> list[Completion]:
    """All prompts, `at_once` in flight, answers in the order of the prompts."""
    gate = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False) as client:

        async def one(prompt: Sequence[int]) -> Completion:
            async with gate:
                return await complete(client, prompt, max_tokens, **options)

        return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))
