"""The torch back end against attention written out per token."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rows import make_row
from torch import Tensor

from device import torch_attention
from device.attention import NumberedLayers, attention_backend, paged_attention
from device.batch import Batch, pack
from device.errors import DeviceSetupError, ModelUnsupported
from device.kv_pool import KvGeometry, KvPool

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, LAYERS = 6, 2, 8, 4, 2
SCALING = 0.3


class Stream:
    """A sequence whose Q, K and V of every position are known."""

    def __init__(self, length: int, blocks: list[int], generator: torch.Generator) -> None:
        self.q = torch.randn(length, HEADS, HEAD_DIM, generator=generator)
        self.k = torch.randn(length, KV_HEADS, HEAD_DIM, generator=generator)
        self.v = torch.randn(length, KV_HEADS, HEAD_DIM, generator=generator)
        self.blocks = blocks
        self.computed = 0

    def expected(self, position: int, window: int | None) -> Tensor:
        first = 0 if window is None else max(0, position - window + 1)
        group = HEADS // KV_HEADS
        out = []
        for head in range(HEADS):
            keys, values = (part[first : position + 1, head // group] for part in (self.k, self.v))
            weights = (keys @ self.q[position, head] * SCALING).softmax(dim=0)
            out.append(weights @ values)
        return torch.stack(out)


def attend(pool: KvPool, batch: Batch, parts: list[tuple[Stream, int, int]], layer: int, window: int | None) -> Tensor:
    q, k, v = (
        torch.cat([getattr(stream, name)[first:last] for stream, first, last in parts]).transpose(0, 1).unsqueeze(0)
        for name in ("q", "k", "v")
    )
    step = attention_backend("torch").plan(pool, batch)
    return step.attend(layer, q, k, v, SCALING, window)


@pytest.mark.parametrize("window", [None, 1, 3, 6, 50])
@pytest.mark.parametrize("tile", [3, 512])
@pytest.mark.parametrize("seed", range(4))
def test_every_token_sees_its_own_past(
    window: int | None, tile: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_attention, "TILE", tile)
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    pool = KvPool(KvGeometry(LAYERS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, torch.float32), 40, torch.device("cpu"))
    # What earlier owners left in the blocks must not be seen.
    pool.tensor.normal_(std=50, generator=generator)
    free = rng.sample(range(40), 40)
    streams = [Stream(20, [free.pop() for _ in range(5)], generator) for _ in range(4)]
    while unfinished := [s for s in streams if s.computed < 20]:
        parts = []
        for stream in rng.sample(unfinished, rng.randint(1, len(unfinished))):
            last = rng.choice([stream.computed + 1, rng.randint(stream.computed + 1, 20)])
            parts.append((stream, stream.computed, last))
            stream.computed = last
        rows = [make_row("r", [0] * (last - first), first, s.blocks) for s, first, last in parts]
        out = attend(pool, pack(rows, BLOCK_SIZE, pool.device), parts, 1, window)
        wanted = [s.expected(position, window) for s, first, last in parts for position in range(first, last)]
        torch.testing.assert_close(out, torch.stack(wanted).unsqueeze(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("count", [4, 5, 6, 7])
def test_the_edge_of_the_window_in_a_first_chunk(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    pool = KvPool(KvGeometry(LAYERS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, torch.float32), 4, torch.device("cpu"))
    stream = Stream(count, [2, 0], generator)
    batch = pack([make_row("r", [0] * count, 0, stream.blocks)], BLOCK_SIZE, pool.device)
    out = attend(pool, batch, [(stream, 0, count)], 0, 5)
    wanted = torch.stack([stream.expected(position, 5) for position in range(count)])
    torch.testing.assert_close(out[0], wanted, rtol=1e-4, atol=1e-4)


def test_padding_reads_no_block_of_another() -> None:
    """Sequences of different length decode together; the blocks of neither may hold up a NaN of a third."""
    generator = torch.Generator().manual_seed(0)
    pool = KvPool(KvGeometry(LAYERS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, torch.float32), 6, torch.device("cpu"))
    pool.tensor[[0, 5]] = float("nan")
    streams = [Stream(1, [3], generator), Stream(9, [1, 2, 4], generator)]
    rows = [make_row("r", [0], 0, [3]), make_row("s", [0], 8, [1, 2, 4])]
    out = attend(pool, pack(rows, BLOCK_SIZE, pool.device), [(streams[0], 0, 1), (streams[1], 8, 9)], 0, None)
    assert out.isfinite().all()


def test_layers_do_not_share_memory() -> None:
    generator = torch.Generator().manual_seed(0)
    pool = KvPool(KvGeometry(LAYERS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, torch.float32), 4, torch.device("cpu"))
    stream = Stream(3, [2], generator)
    batch = pack([make_row("r", [0] * 3, 0, [2])], BLOCK_SIZE, pool.device)
    attend(pool, batch, [(stream, 0, 3)], 0, None)
    assert pool.tensor[2, 0].any()
    assert not pool.tensor[:, 1].any()


def test_an_unknown_back_end_is_named_with_the_known_ones() -> None:
    with pytest.raises(DeviceSetupError, match=r"'flash9'.*torch"):
        attention_backend("flash9")


@pytest.mark.parametrize(
    ("options", "word"),
    [({"s_aux": torch.zeros(1)}, "s_aux"), ({"softcap": 30.0}, "softcap"), ({"paged": None}, "not plain causal")],
)
def test_attention_that_we_lack_is_refused(options: dict[str, Any], word: str) -> None:
    q = torch.zeros(1, 1, 1, 1)
    with pytest.raises(ModelUnsupported, match=word):
        paged_attention(SimpleNamespace(layer_idx=0), q, q, q, None, **options)


def test_attention_layers_are_numbered_among_themselves() -> None:
    seen: list[int] = []

    class Noting:
        def attend(
            self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
        ) -> Tensor:
            seen.append(layer)
            return query

    step, nothing = NumberedLayers(Noting(), (1, 4, 5)), torch.zeros(1)
    for layer in (4, 1, 5):
        assert step.attend(layer, nothing, nothing, nothing, 1.0, None) is nothing
    assert seen == [1, 0, 2]
