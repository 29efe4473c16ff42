"""What the sampler needs to know of a row."""

from collections.abc import Sequence
from typing import NamedTuple

from scheduler.contract import Draw, Row
from scheduler.effects import NO_SLOT
from scheduler.ids import RequestId
from scheduler.request import SamplingParams


class Drawn(NamedTuple):
    """One draw of a step, noted at launch: at depth 2 the row may move on before the device comes to it.

    known: the row's own list, which only grows; its first `end` ids are before the drawn one. prompt_tokens: how many
    of them are the prompt. fed: one more id is before the drawn one, at position `end`, that only the device knows.
    slot: NO_SLOT for a sequence that owns none.
    """

    request_id: RequestId
    draw: Draw
    known: Sequence[int]
    end: int
    prompt_tokens: int = 0
    slot: int = NO_SLOT
    fed: bool = False

    @classmethod
    def of(cls, row: Row, draw: Draw, fed: bool = False) -> "Drawn":
        return cls(row.request_id, draw, row.known, row.end, row.prompt_tokens, row.slot, fed)

    @property
    def position(self) -> int:
        """The position of the drawn token. With the seed it keys the draw, which is all the state that draws have."""
        return self.end + self.fed


def has_penalty(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
