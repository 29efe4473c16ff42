"""The main job with far too little KV memory: 1.5 requests on each side, 16 requests at once.

32 of them with PRELAY_SOAK set (`make soak`).
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from determinism import SOAK
from load import complete_all
from reference import answers, prompts
from served import Served, serve, wait_until

REQUESTS = 32 if SOAK else 16
PROMPT_TOKENS = 27
ANSWER_TOKENS = 12
BLOCK_SIZE = 7
"""In fp32 such a block of SmolLM2 has 0.31 MiB, so that a few MiB are exactly the blocks wanted here."""
KV_MIB = {"prefill": 2, "decode": 3}
PROMPT_BLOCKS = 4
"""Also what a reservation takes: the prompt and one token."""
REQUEST_BLOCKS = 6
"""The last token's KV is never computed: 27 + 12 - 1 positions."""

SHAPES: dict[str, dict[str, Any]] = {
    "recompute": {"decode": {"preemption": "recompute"}},
    "none": {"prefill": {"preemption": "none"}, "decode": {"preemption": "none"}},
    "spill": {"decode": {"preemption": "spill", "spill_mib": 64}},
}


@pytest.fixture(scope="module")
def short_questions(model_folder: Path) -> list[tuple[int, ...]]:
    return prompts(model_folder, [PROMPT_TOKENS] * REQUESTS)


@pytest.fixture(scope="module")
def short_answers(model_folder: Path, short_questions: list[tuple[int, ...]]) -> list[list[int]]:
    return answers(model_folder, short_questions, ANSWER_TOKENS)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_deadlocks_and_every_answer_is_right(
    shape: str, server_home: Path, short_questions: list[tuple[int, ...]], short_answers: list[list[int]]
) -> None:
    settings = {"dtype": "fp32", "block_size": BLOCK_SIZE, **SHAPES[shape]}
    for role, kv_mib in KV_MIB.items():
        settings[role] = {"kv_mib": kv_mib, **settings.get(role, {})}
    with serve(server_home, settings) as served:
        assert blocks(served) == {"prefill": PROMPT_BLOCKS * 3 // 2, "decode": REQUEST_BLOCKS * 3 // 2}
        completions = asyncio.run(complete_all(served.url, short_questions, ANSWER_TOKENS, at_once=REQUESTS))
        assert [completion.tokens for completion in completions] == short_answers
        wait_until(lambda: served.owned_blocks() == 0, 5)
        counters = {node["role"]: node["counters"] for node in served.status()["nodes"]}
        require_pressure(shape, counters["decode"])
        assert counters["prefill"]["preemptions"] == 0
        assert counters["prefill"]["expired_leases"] == counters["decode"]["expired_leases"] == 0


def blocks(served: Served) -> dict[str, int]:
    return {node["role"]: node["blocks"]["total"] for node in served.status()["nodes"]}


def require_pressure(shape: str, counters: dict[str, int]) -> None:
    """Two reservations fit and two whole requests don't, so without a guarantee somebody must give way."""
    if shape == "none":
        assert counters["preemptions"] == 0
        return
    assert counters["preemptions"] > 0
    if shape == "spill":
        assert counters["spills"] == counters["restores"] == counters["preemptions"]
        assert counters["recomputed_tokens"] == 0
    else:
        assert counters["spills"] == 0
