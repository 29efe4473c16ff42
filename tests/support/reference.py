"""Real prompts, and what `transformers` answers to them: greedy, fp32, exactly `n` tokens."""

from pathlib import Path
from pydoc_data.topics import topics

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

LENGTHS = (1, 2, 3, 5, 8, 15, 16, 17, 24, 31, 32, 33, 48, 64, 65, 100, 128, 200, 256, 400, 512, 777, 1100, 1500)


def prompts(folder: Path) -> list[tuple[int, ...]]:
    """One prompt of each length in LENGTHS: different passages of English text."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "\n".join(topics[name] for name in sorted(topics))
    ids: list[int] = tokenizer(text[:200_000], verbose=False)["input_ids"]
    starts = [index * 1700 for index in range(len(LENGTHS))]
    return [tuple(ids[start : start + length]) for start, length in zip(starts, LENGTHS, strict=True)]


def answers(folder: Path, questions: list[tuple[int, ...]], n: int) -> list[list[int]]:
    """The `n` tokens after each prompt. The end-of-text token does not end an answer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        return [_generate(model, question, n) for question in questions]


def _generate(model: torch.nn.Module, question: tuple[int, ...], n: int) -> list[int]:
    ids = torch.tensor([question])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False)
    tokens: list[int] = output[0, len(question) :].tolist()
    return tokens
