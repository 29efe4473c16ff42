"""Clients that leave, at any moment: all blocks come back within a second, and the others don't notice."""

import asyncio
import random
from pathlib import Path

import httpx
from load import body, complete
from reference import answers, prompts
from served import Served, wait_until

BYSTANDER_TOKENS = 24
"""Of the prompt whose answer is watched."""


async def leave_after(client: httpx.AsyncClient, prompt: tuple[int, ...], delay_s: float) -> None:
    """Ask for a long answer, and close the connection after `delay_s`."""
    try:
        async with asyncio.timeout(delay_s):
            request = body(prompt, 400, stream=True)
            async with client.stream("POST", "/v1/completions", json=request) as response:
                async for _ in response.aiter_bytes():
                    pass
    except TimeoutError:
        return


async def storm(url: str, bystander: tuple[int, ...], questions: list[tuple[int, ...]], seed: int) -> list[int]:
    """Many clients that leave at random moments around one that stays. Returns the answer of the latter."""
    rng = random.Random(seed)
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:
        staying = asyncio.create_task(complete(client, bystander, 64))
        leaving = [leave_after(client, rng.choice(questions), rng.uniform(0.0, 2.5)) for _ in range(24)]
        await asyncio.gather(*leaving)
        return (await staying).tokens


def test_leaving_clients_leak_nothing_and_disturb_nobody(pair: Served, model_folder: Path) -> None:
    questions = prompts(model_folder)
    bystander = next(question for question in questions if len(question) == BYSTANDER_TOKENS)
    (expected,) = answers(model_folder, [bystander], 64)
    for seed in range(2):
        tokens = asyncio.run(storm(pair.url, bystander, questions, seed))
        assert tokens == expected
        wait_until(lambda: pair.owned_blocks() == 0, 1.0 if seed else 3.0)
    handoffs = pair.status()["handoffs"]
    assert handoffs["active"] == 0
    assert handoffs.get("failed", 0) == 0
