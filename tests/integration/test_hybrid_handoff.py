"""Hybrid models through whole handoffs: KV and recurrent state move, and every answer is that of `transformers`.

Real nodes, threads and driver in one process, fp32 on the CPU, and real bytes over the memory transport or UCX.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from faulty_transport import Faults
from local_cluster import Answer, ClusterShape, LocalCluster
from reference import answers
from tiny_hybrids import VOCABULARY, build_hybrid, save_hybrid

from device.async_router import AsyncRouter
from handoff.coordinator import Completion, Order
from handoff.transports.base import Transport
from handoff.transports.memory import MemoryFabric
from handoff.transports.ucx import UcxTransport
from scheduler.batching import BatchLimits
from scheduler.contract import DeviceIo
from scheduler.ids import RequestId
from scheduler.policies import Preemption, SchedulingPolicy
from scheduler.request import Request

LIMITS = BatchLimits(max_tokens=16, max_sequences=6)
SETUPS = [
    ("bamba", "sync", "destination_first"),
    ("bamba", "async", "source_first"),
    ("qwen3-next", "sync", "source_first"),
    ("qwen3-next", "async", "destination_first"),
]
"""Model, router and order: each pair of them is there."""
LENGTHS = (1, 3, 4, 9, 16, 23, 41)
"""Some end with a block, some are longer than a chunk, and there are more of them than slots."""


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def saved(model: str) -> Path:
        folder = tmp_path_factory.mktemp(model)
        save_hybrid(model, folder)
        return folder

    return saved


@pytest.fixture(params=SETUPS, ids="-".join)
def setup(request: pytest.FixtureRequest) -> tuple[str, str, str]:
    chosen: tuple[str, str, str] = request.param
    return chosen


@pytest.fixture
def folder(setup: tuple[str, str, str], folder_of: Callable[[str], Path]) -> Path:
    return folder_of(setup[0])


@pytest.fixture
def router(setup: tuple[str, str, str]) -> str:
    return setup[1]


@pytest.fixture
def order(setup: tuple[str, str, str]) -> Order:
    return Order(setup[2])


def shape_of(
    folder: Path, router: str, order: Order, device: dict[str, Any] | None = None, **sizes: Any
) -> ClusterShape:
    """device: changes to the settings of `build_hybrid`, on both nodes."""

    def make(blocks: int) -> tuple[DeviceIo, object]:
        inner = build_hybrid(folder, total_blocks=blocks, **{"spill_bytes": 1 << 22, **(device or {})})
        pool = inner.pool.bytes_view()
        return (AsyncRouter(inner) if router == "async" else inner), pool

    options: dict[str, Any] = {"prefill_blocks": 60, "decode_blocks": 60, "limits": LIMITS, **sizes}
    return ClusterShape(order=order, make_device=make, **options)


def prompt_of(seed: int, length: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(VOCABULARY) for _ in range(length))


async def serve_all(cluster: LocalCluster, name: str, prompts: Sequence[tuple[int, ...]], n: int) -> list[Answer]:
    asked = [Request(RequestId(f"{name}{i}"), prompt, n) for i, prompt in enumerate(prompts)]
    return await asyncio.gather(*(cluster.serve(request) for request in asked))


def require_right(folder: Path, served: Sequence[Answer], prompts: Sequence[tuple[int, ...]], n: int) -> None:
    assert [answer.error for answer in served] == [""] * len(served)
    assert [answer.tokens for answer in served] == answers(folder, list(prompts), n)
    for answer in served:
        assert answer.record is not None
        assert answer.record.completion is Completion.HANDED_OVER


async def counters_of(cluster: LocalCluster, name: str) -> dict[str, int]:
    counters: dict[str, int] = (await cluster.status(name))["counters"]
    return counters


async def require_no_slot_owned(cluster: LocalCluster) -> None:
    """Every node is drained, has no slot in use, and no effect or step of it failed."""
    await cluster.require_drained()
    for name, node in cluster.ports.nodes.items():
        slots = node._scheduler.kv.slots
        await cluster.until(lambda slots=slots: slots.free == slots.total)  # type: ignore[misc]
        counters = await counters_of(cluster, name)
        assert counters["failed_effects"] == counters["failed_steps"] == 0


async def test_answers_are_those_of_transformers(folder: Path, router: str, order: Order) -> None:
    """Twice: the second time slots and blocks hold what others left in them."""
    async with LocalCluster(shape_of(folder, router, order)) as cluster:
        for turn in range(2):
            prompts = [prompt_of(100 * turn + length, length) for length in LENGTHS]
            served = await serve_all(cluster, f"turn{turn}-", prompts, 8)
            require_right(folder, served, prompts, 8)
        await require_no_slot_owned(cluster)


@pytest.mark.parametrize("model", ["bamba", "qwen3-next"])
async def test_answers_are_those_of_transformers_over_ucx(model: str, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of(model)
    prompts = [prompt_of(length, length) for length in LENGTHS]
    transports: list[Transport] = []

    def make_transport() -> Transport:
        transports.append(UcxTransport())
        return transports[-1]

    shape = shape_of(folder, "async", Order.DESTINATION_FIRST, make_transport=make_transport)
    async with LocalCluster(shape) as cluster:
        served = await serve_all(cluster, "r", prompts, 8)
        require_right(folder, served, prompts, 8)
        await require_no_slot_owned(cluster)
    assert len(transports) == 2


@pytest.mark.parametrize("model", ["bamba", "qwen3-next"])
@pytest.mark.parametrize("block_size", [2, 16])
async def test_blocks_of_other_sizes_are_re_laid_out_over_ucx(
    model: str, block_size: int, folder_of: Callable[[str], Path]
) -> None:
    """Twice: the second time through the prefix caches, whose blocks end in different places."""
    folder = folder_of(model)
    prompts = [prompt_of(length, length) for length in LENGTHS]
    decode_blocks = 61

    def make(blocks: int) -> tuple[DeviceIo, object]:
        other = {"block_size": block_size, "staging_bytes": 1 << 15} if blocks == decode_blocks else {}
        router = build_hybrid(folder, total_blocks=blocks, **other)
        return AsyncRouter(router), router.pool.bytes_view()

    shape = ClusterShape(
        make_device=make,
        prefill_blocks=60,
        decode_blocks=decode_blocks,
        limits=LIMITS,
        max_reservations=3,
        make_transport=UcxTransport,
    )
    async with LocalCluster(shape) as cluster:
        for turn in range(2):
            served = await serve_all(cluster, f"turn{turn}-", prompts, 8)
            require_right(folder, served, prompts, 8)
        await require_no_slot_owned(cluster)


async def test_the_state_moves_even_where_all_blocks_are_there(folder: Path, router: str, order: Order) -> None:
    """A prompt of full blocks again: no KV is missing at the destination, and the recurrent state still has to come."""
    prompt = prompt_of(1, 16)
    async with LocalCluster(shape_of(folder, router, order)) as cluster:
        for name in ("first", "again"):
            (answer,) = await serve_all(cluster, name, [prompt], 8)
            require_right(folder, [answer], [prompt], 8)
        slot_bytes = cluster.node("decode-0")._facts.slot_bytes
        assert answer.record is not None
        assert answer.record.transfer is not None
        assert answer.record.transfer.blocks == 0
        assert answer.record.transfer.bytes_moved == slot_bytes > 0
        await require_no_slot_owned(cluster)


async def test_a_prefix_is_taken_up_at_a_checkpoint(folder: Path, router: str, order: Order) -> None:
    """Checkpoints stand at the chunks' ends: after 16 tokens, and after the 20 that fill blocks."""
    prompt = prompt_of(2, 23)
    asked = {
        "first": (prompt, 0),
        "again": (prompt, 20),
        "longer": (prompt + prompt_of(3, 14), 20),
        "fork": (prompt[:18] + prompt_of(4, 9), 16),
        "no checkpoint": (prompt[:14] + prompt_of(5, 9), 0),
    }
    async with LocalCluster(shape_of(folder, router, order, device={"snapshots": 12})) as cluster:
        for name, (one, cached) in asked.items():
            (answer,) = await serve_all(cluster, name, [one], 8)
            require_right(folder, [answer], [one], 8)
            assert answer.cached_tokens == cached, name
        await require_no_slot_owned(cluster)


async def test_few_snapshots_are_reused_and_never_mixed_up(folder: Path, router: str, order: Order) -> None:
    """Two places for the checkpoints of many prompts, asked twice in different company."""
    rng = random.Random(6)
    prefixes = [prompt_of(10 + i, 12) for i in range(3)]
    prompts = [rng.choice(prefixes) + prompt_of(20 + i, rng.randint(1, 12)) for i in range(8)]
    async with LocalCluster(shape_of(folder, router, order, device={"snapshots": 2})) as cluster:
        for turn in range(3):
            rng.shuffle(prompts)
            require_right(folder, await serve_all(cluster, f"turn{turn}-", prompts, 6), prompts, 6)
        await require_no_slot_owned(cluster)


@pytest.mark.parametrize("preemption", [Preemption.RECOMPUTE, Preemption.SPILL], ids=lambda p: p.value)
async def test_preempted_ones_go_on_as_if_nothing_had_been(
    folder: Path, router: str, order: Order, preemption: Preemption
) -> None:
    prompts = [prompt_of(30 + i, 9 + i) for i in range(6)]
    policy = SchedulingPolicy(preemption=preemption, immunity_tokens=4)
    shape = shape_of(folder, router, order, decode_blocks=15, policy=policy)
    async with LocalCluster(shape) as cluster:
        require_right(folder, await serve_all(cluster, "r", prompts, 20), prompts, 20)
        await require_no_slot_owned(cluster)
        counters = await counters_of(cluster, "decode-0")
        assert counters["preemptions"] > 0
        if preemption is Preemption.SPILL:
            assert counters["restores"] == counters["spills"] == counters["preemptions"]
        else:
            assert counters["recomputed_tokens"] > 0
            assert counters["spills"] == 0


async def test_fewer_slots_than_requests_only_make_them_wait(folder: Path, router: str, order: Order) -> None:
    prompts = [prompt_of(40 + i, 5 + i) for i in range(7)]
    async with LocalCluster(shape_of(folder, router, order, device={"slots": 1})) as cluster:
        require_right(folder, await serve_all(cluster, "r", prompts, 6), prompts, 6)
        await require_no_slot_owned(cluster)


async def test_fault_04_failed_groups_give_an_error_and_never_another_answer(
    folder: Path, router: str, order: Order
) -> None:
    """First all that travels fails; then, with all blocks there already, the state alone."""
    faults, fabric = Faults(), MemoryFabric()
    shape = shape_of(folder, router, order, make_transport=lambda: faults.transport(fabric))
    asked = [prompt_of(5, 41)]
    (expected,) = answers(folder, asked, 8)
    async with LocalCluster(shape) as cluster:
        for turn in ("all", "state"):
            posted = faults.sends
            faults.fail_sends = set(range(posted, posted + 100))
            (broken,) = await serve_all(cluster, f"broken-{turn}", asked, 8)
            assert faults.sends > posted
            assert "posted other pieces" in broken.error
            assert broken.tokens in ([], expected[:1])
            faults.fail_sends = set()
            await cluster.require_drained()
            (right,) = await serve_all(cluster, f"right-{turn}", asked, 8)
            require_right(folder, [right], asked, 8)
        await require_no_slot_owned(cluster)
