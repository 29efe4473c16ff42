"""Last chunks that travel layer by layer, in real nodes: every answer is that of `transformers`.

Of two attention layers, one leaves while the step runs and one with the record.
"""

import asyncio
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from local_cluster import Answer, ClusterShape, LocalCluster
from reference import answers
from tiny_hybrids import build_hybrid, save_hybrid
from tiny_model import build_tiny, save_tiny_model

from device.async_router import AsyncRouter
from handoff.coordinator import Completion, Order
from handoff.transports.base import Transport
from handoff.transports.ucx import UcxTransport
from scheduler.batching import BatchLimits
from scheduler.contract import DeviceIo
from scheduler.ids import RequestId
from scheduler.request import Request

LENGTHS = (1, 3, 4, 9, 16, 23, 41)
CHUNK, LAYERWISE, BLOCK_SIZE = 16, 4, 4


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def saved(model: str) -> Path:
        folder = tmp_path_factory.mktemp(model)
        if model == "llama":
            save_tiny_model(folder)
        else:
            save_hybrid(model, folder)
        return folder

    return saved


def shape_of(folder: Path, is_async: bool, transport: Callable[[], Transport] | None) -> ClusterShape:
    hybrid = folder.name.startswith("bamba")

    def make(blocks: int) -> tuple[DeviceIo, object]:
        inner = build_hybrid(folder, total_blocks=blocks) if hybrid else build_tiny(folder, total_blocks=blocks)
        return (AsyncRouter(inner) if is_async else inner), inner.pool.bytes_view()

    return ClusterShape(
        prefill_blocks=60,
        decode_blocks=60,
        limits=BatchLimits(max_tokens=CHUNK, max_sequences=6),
        order=Order.DESTINATION_FIRST,
        make_device=make,
        make_transport=transport,
        layerwise_tokens=LAYERWISE,
    )


async def serve_all(shape: ClusterShape, folder: Path, seed: int) -> list[Answer]:
    rng = random.Random(seed)
    prompts = [tuple(rng.randrange(60) for _ in range(length)) for length in LENGTHS]
    async with LocalCluster(shape) as cluster:
        asked = [Request(RequestId(f"r{i}"), prompt, 8) for i, prompt in enumerate(prompts)]
        served: list[Answer] = await asyncio.gather(*(cluster.serve(request) for request in asked))
        await cluster.require_drained()
    assert [answer.error for answer in served] == [""] * len(served)
    assert [answer.tokens for answer in served] == answers(folder, prompts, 8)
    assert all(answer.record and answer.record.completion is Completion.HANDED_OVER for answer in served)
    return served


@pytest.mark.parametrize("transport", [None, UcxTransport], ids=["memory", "ucx"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("model", ["llama", "bamba"])
async def test_answers_are_those_of_transformers(
    model: str, is_async: bool, transport: type[UcxTransport] | None, folder_of: Callable[[str], Path]
) -> None:
    folder = folder_of(model)
    await serve_all(shape_of(folder, is_async, transport), folder, 1)


async def test_half_of_a_long_last_chunk_is_on_its_way_before_it_is_computed(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("llama")
    shape = shape_of(folder, True, None)
    prompt = tuple(range(1, CHUNK + 1))
    async with LocalCluster(shape) as cluster:
        block_bytes = cluster.node("prefill-0")._facts.block_bytes
        for length, share in ((CHUNK, 2), (LAYERWISE - 1, 1)):
            answer = await cluster.serve(Request(RequestId(f"of-{length}"), prompt[-length:], 2))
            assert answer.record is not None
            assert answer.record.transfer is not None
            blocks = -(-length // BLOCK_SIZE)
            assert answer.record.transfer.blocks == blocks
            assert answer.record.transfer.bytes_moved == blocks * block_bytes
            assert answer.record.transfer.exposed_bytes == blocks * block_bytes // share
