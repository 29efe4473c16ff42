"""Any two pools of one model, any part of a sequence, any staging area: every byte ends where it must."""

from dataclasses import replace

from determinism import deterministic
from hypothesis import given
from hypothesis import strategies as st
from relayout_drive import ranks_with_other_bytes

from handoff.relayout.convert import EXACT, WORDS
from handoff.relayout.shape import KvShape

DTYPES = (*((dtype, dtype) for dtype in WORDS), *EXACT)
LONGEST = 70


def degrees(kv_heads: int) -> st.SearchStrategy[int]:
    """Ranks that `kv_heads` can be held by."""
    return st.sampled_from([n for n in range(1, 13) if kv_heads % n == 0 or n % kv_heads == 0])


@st.composite
def pairs(draw: st.DrawFn) -> tuple[KvShape, KvShape]:
    dtype, into = draw(st.sampled_from(DTYPES))
    layers, kv_heads, head_dim = draw(st.tuples(st.integers(1, 3), st.integers(1, 8), st.integers(1, 5)))
    source = KvShape(layers, kv_heads, head_dim, draw(st.integers(1, 40)), dtype, draw(degrees(kv_heads)))
    other, ranks = draw(st.integers(1, 40)), draw(degrees(kv_heads))
    return source, replace(source, block_size=other, dtype=into, ranks=ranks)


@deterministic(200)
@given(
    shapes=pairs(),
    ends=st.tuples(st.integers(0, LONGEST), st.integers(0, LONGEST)),
    staged_blocks=st.integers(1, 9),
    turn=st.integers(0, 2**32),
)
def test_every_byte_ends_where_it_must(
    shapes: tuple[KvShape, KvShape], ends: tuple[int, int], staged_blocks: int, turn: int
) -> None:
    tokens = range(min(ends), max(ends))
    assert ranks_with_other_bytes(*shapes, tokens, staged_blocks, turn) == []
