"""Real prompts, and what `transformers` answers to them: greedy, fp32, exactly `n` tokens."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from determinism import SOAK
from transformers import AutoModelForCausalLM, AutoTokenizer

LENGTHS = (1, 2, 3, 5, 8, 15, 16, 17, 24, 31, 32, 33, 48, 64, 65, 100, 128, 200, 256, 400, 512, 777, 1100, 1500)

REPRESENTATIVE = (1, 2, 8, 15, 16, 17, 24, 64, 100, 256, 512, 1500)
"""The extremes, around a block's end, one chunk, several chunks."""
ANSWER_TOKENS = 64 if SOAK else 32


def main_prompts(folder: Path) -> list[tuple[int, ...]]:
    """Those of the main job: of 12 lengths, or of all 24 with PRELAY_SOAK set."""
    return [prompt for prompt in prompts(folder) if SOAK or len(prompt) in REPRESENTATIVE]


def prompts(folder: Path, lengths: Sequence[int] = LENGTHS) -> list[tuple[int, ...]]:
    """One prompt of each length: different passages of English text."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "\n".join(topics[name] for name in sorted(topics))
    ids: list[int] = tokenizer(text[:200_000], verbose=False)["input_ids"]
    starts = [index * (max(lengths) + 200) for index in range(len(lengths))]
    return [tuple(ids[start : start + length]) for start, length in zip(starts, lengths, strict=True)]


def answers(folder: Path, questions: list[tuple[int, ...]], n: int) -> list[list[int]]:
    """The `n` tokens after each prompt. The end-of-text token does not end an answer.

    Prompts of one length that follow each other are computed at once.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return [answer for _, same in groupby(questions, len) for answer in generate(model, list(same), n)]


@torch.inference_mode()
def generate(model: Any, questions: Sequence[Sequence[int]], n: int) -> list[list[int]]:
    """The `n` greedy tokens after each prompt; all have one length. Ends of text don't end an answer."""
    ids = torch.tensor(questions)
    output = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, min_new_tokens=n, do_sample=False
    )
    tokens: list[list[int]] = output[:, ids.shape[1] :].tolist()
    return tokens
