"""Rows as tests think of them: by what is new in a step."""

from collections.abc import Sequence

from scheduler.contract import Draw, Row
from scheduler.ids import RequestId


def make_row(
    name: str,
    tokens: Sequence[int],
    start: int,
    blocks: Sequence[int],
    draw: Draw | None = None,
    past: Sequence[int] | None = None,
) -> Row:
    """A row that computes `tokens`, which are the last that are known. past: the `start` ids before them, or zeros."""
    known = [*([0] * start if past is None else past), *tokens]
    return Row(RequestId(name), known, start, start + len(tokens), blocks, draw)
