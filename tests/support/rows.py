"""Rows as tests think of them: by what is new in a step."""

from collections.abc import Sequence

from scheduler.contract import DeviceFacts, Draw, Row
from scheduler.ids import RequestId

TINY_FACTS = DeviceFacts(
    model="tiny",
    model_digest="0",
    device="cpu",
    attention="torch",
    dtype="fp32",
    layers=1,
    kv_heads=1,
    head_dim=1,
    vocab_size=50,
    block_size=4,
    total_blocks=10,
    block_bytes=32,
    max_model_len=30,
)
"""What a very small device would say of itself."""


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
