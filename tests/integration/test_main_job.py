"""The main job against `transformers`: real model, real processes, real UCX, token by token.

12 prompts of 1 to 1,500 tokens and 32 tokens after each; 24 prompts and 64 tokens with PRELAY_SOAK set (`make soak`).
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from load import complete_all
from reference import ANSWER_TOKENS
from served import Served, pools, serve, wait_until

Prompts = list[tuple[int, ...]]
AT_ONCE = 8
BLOCK = 16


def run(served: Served, questions: Prompts) -> tuple[list[list[int]], list[int]]:
    """The tokens of each answer, and the cached tokens of each prompt."""
    completions = asyncio.run(complete_all(served.url, questions, ANSWER_TOKENS, AT_ONCE))
    assert {c.finish_reason for c in completions} == {"length"}
    return [c.tokens for c in completions], [c.cached for c in completions]


def assert_all_returned(served: Served) -> None:
    """Nothing is owned any more, and what was released stays as prefix cache."""
    wait_until(lambda: served.owned_blocks() == 0, 5)
    for node in served.status()["nodes"]:
        assert node["drained"]
        assert node["blocks"]["cached"] > 0
        assert node["blocks"]["free"] + node["blocks"]["cached"] == node["blocks"]["total"]


SHAPES: dict[str, dict[str, Any]] = {
    "1x1": pools(),
    "2x2-destination-first": pools(nodes=2),
    "2x2-source-first": {**pools(nodes=2), "order": "source_first"},
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("shape", SHAPES)
def test_answers_equal_transformers_and_all_blocks_return(
    shape: str, server_home: Path, questions: Prompts, expected: list[list[int]]
) -> None:
    with serve(server_home, {"dtype": "fp32", **SHAPES[shape]}) as served:
        tokens, cached = run(served, questions)
        assert tokens == expected
        assert cached == [0] * len(questions)
        assert_all_returned(served)
        assert_shared_memory_lanes(served)

        tokens, cached = run(served, questions)
        assert tokens == expected
        if shape == "1x1":
            assert_only_missing_blocks_travelled(served, questions, cached)
        else:
            assert sum(cached) > 0
        assert_all_returned(served)


def assert_shared_memory_lanes(served: Served) -> None:
    links = [link for node in served.status()["nodes"] for link in node["links"]]
    assert links
    assert [link for link in links if "tcp" in link["lane"] or link["warning"]] == []


def assert_only_missing_blocks_travelled(served: Served, questions: Prompts, cached: list[int]) -> None:
    """The source recomputes the last token only, for its logits; the destination takes every full block it has."""
    assert cached == [len(question) - 1 for question in questions]
    recent = served.status()["recent"][-len(questions) :]
    moved = {record["prompt_tokens"]: record["transfer"]["blocks"] for record in recent}
    assert moved == {len(question): -(-len(question) // BLOCK) - len(question) // BLOCK for question in questions}
