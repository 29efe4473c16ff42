"""Sequences that a test drives through a router by hand, step by step."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from device.router import SyncRouter
from scheduler.contract import Decode, Draw, Prefill, Row
from scheduler.effects import NO_SLOT
from scheduler.ids import RequestId
from scheduler.request import SamplingParams

GREEDY = Draw(SamplingParams())


@dataclass
class Driven:
    """A request on its way: what is known of it, and how far its state has come."""

    name: str
    tokens: list[int]
    blocks: list[int]
    slot: int = NO_SLOT
    computed: int = 0
    prompt_length: int = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.tokens)
        self.prompt_length = len(self.tokens)

    @property
    def drawn(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def request_id(self) -> RequestId:
        return RequestId(self.name)

    def row(self, count: int) -> Row:
        end = self.computed + count
        draw = GREEDY if end == len(self.tokens) else None
        return Row(self.request_id, self.tokens, self.computed, end, self.blocks, draw, self.slot)

    def settle(self, count: int, token: int | None) -> None:
        self.computed += count
        if token is not None:
            self.tokens.append(token)


def step(router: SyncRouter, parts: Sequence[tuple[Driven, int]]) -> None:
    """One step that computes so many tokens of each sequence."""
    rows = tuple(sequence.row(count) for sequence, count in parts)
    plan = Decode(rows) if all(row.count == 1 for row in rows) else Prefill(rows)
    result = router.await_result(router.launch(plan))
    for (sequence, count), token in zip(parts, result.tokens, strict=True):
        sequence.settle(count, token)


def run(router: SyncRouter, sequence: Driven, new_tokens: int, chunk: int = 1 << 30) -> list[int]:
    """Drive one sequence to its end, alone, its prompt in chunks. Returns its tokens."""
    while len(sequence.drawn) < new_tokens:
        step(router, [(sequence, min(chunk, len(sequence.tokens) - sequence.computed))])
    return sequence.drawn


def run_mixed(router: SyncRouter, sequences: Sequence[Driven], new_tokens: int, rng: random.Random) -> None:
    """Drive sequences to their end with chunks of random size, in random company."""
    while unfinished := [s for s in sequences if len(s.drawn) < new_tokens]:
        company = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        step(router, [(s, rng.randint(1, len(s.tokens) - s.computed)) for s in company])
