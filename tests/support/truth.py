"""What any correct run answers, and the KV that it leaves, from the tokens alone.

The device is `KvMachine`: a position's KV is a mix of all tokens up to it, a drawn token a hash of all KV before it.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from kv_machine import draw, mix

from scheduler.contract import Draw
from scheduler.request import FinishReason, Request

VOCAB_SIZE = 1000
_ROOT = 0x5DEECE66D


@dataclass(frozen=True, slots=True)
class Answer:
    """tokens: all that a request gets, the last one ends it. finish: why."""

    tokens: tuple[int, ...]
    finish: FinishReason

    def finish_at(self, index: int) -> FinishReason | None:
        return self.finish if index == len(self.tokens) - 1 else None


@lru_cache(maxsize=4096)
def kv_values(tokens: tuple[int, ...]) -> tuple[int, ...]:
    """What a device holds for `tokens` from position 0 on."""
    values: list[int] = []
    for position, token in enumerate(tokens):
        values.append(mix(values[-1] if values else _ROOT, token, position))
    return tuple(values)


@lru_cache(maxsize=4096)
def right_answer(request: Request) -> Answer:
    known = list(request.prompt)
    values = list(kv_values(request.prompt))
    outputs: list[int] = []
    while True:
        number = len(outputs) + 1
        suppress = request.stop_token_ids if number <= request.min_tokens else frozenset[int]()
        token = draw(np.array(values, np.int64), Draw(request.sampling, suppress), VOCAB_SIZE)
        outputs.append(token)
        if token in request.stop_token_ids:
            return Answer(tuple(outputs), FinishReason.STOP)
        if number == request.max_tokens:
            return Answer(tuple(outputs), FinishReason.LENGTH)
        values.append(mix(values[-1], token, len(known)))
        known.append(token)
