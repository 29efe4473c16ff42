"""The rows of a fed step as if their next token were known: they pass the same checks and pack the same way."""

from collections.abc import Sequence
from typing import overload

from device.draws import Drawn
from scheduler.contract import DecodeFed, Row

UNFED = 0
"""Stands where the device puts the fed id."""


class _WithNext(Sequence[int]):
    """`known` as it is now and one id more. It stays so when `known` grows."""

    def __init__(self, known: Sequence[int], length: int) -> None:
        self._known = known
        self._length = length

    def __len__(self) -> int:
        return self._length + 1

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        return self._known[place] if place < self._length else UNFED


def fed_rows(plan: DecodeFed) -> tuple[Row, ...]:
    """The rows that a fed step computes, as they are when it runs, whatever becomes of the plan's rows."""
    return tuple(
        Row(
            row.request_id,
            _WithNext(row.known, row.end),
            row.end,
            row.end + 1,
            tuple(row.blocks),
            draw,
            row.slot,
            row.adapter,
            row.prompt_tokens,
        )
        for row, draw in zip(plan.rows, plan.draws, strict=True)
    )


def fed_draws(plan: DecodeFed) -> list[Drawn]:
    """How their tokens are drawn, by the plan's rows: a draw knows the list that a sequence keeps."""
    return [Drawn.of(row, draw, fed=True) for row, draw in zip(plan.rows, plan.draws, strict=True)]
