"""On CUDA a layer is told of when the device has written it, not when the host has queued it."""

from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from tiny_model import build_tiny, save_tiny_model

from device.async_router import AsyncRouter
from scheduler.contract import Draw, LayerWatch, Prefill, Row
from scheduler.ids import RequestId
from scheduler.request import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CYCLES = 1 << 29
BLOCKS = [5, 2]


def test_what_is_told_of_is_in_the_pool(tmp_path: Path) -> None:
    """Read on another stream, which waits for nothing."""
    save_tiny_model(tmp_path)
    inner = build_tiny(tmp_path, device="cuda", slots=1)
    router = AsyncRouter(inner)
    row = Row(RequestId("a"), [*range(1, 8)], 0, 7, BLOCKS, Draw(SamplingParams()), slot=0, prompt_tokens=7)
    router.await_result(router.launch(Prefill((row,))))  # what is loaded on first use is loaded
    expected = inner.pool.tensor[BLOCKS].cpu()
    inner.pool.tensor.zero_()
    torch.cuda.synchronize()
    side, early, came = torch.cuda.Stream(), [], Event()

    def tell(layers: int) -> None:
        with torch.cuda.stream(side):
            early.append((layers, inner.pool.tensor[BLOCKS].cpu()))
        came.set()

    torch.cuda._sleep(CYCLES)
    ticket = router.launch(Prefill((row,), LayerWatch((1,), tell)))
    assert not came.is_set()
    router.await_result(ticket)
    assert came.wait(20.0)
    ((layers, pool),) = early
    found: Any = pool[:, :layers]
    assert torch.equal(found, expected[:, :layers])
    router.teardown()
