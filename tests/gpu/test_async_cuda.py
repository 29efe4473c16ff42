"""The asynchronous router on CUDA: the synchronous one's tokens, and a host that never waits where it launches."""

import random
from pathlib import Path

import pytest
import torch
from device_scenarios import SCENARIOS, expect_depth_two, play
from tiny_model import build_tiny, save_tiny_model

from device.async_router import AsyncRouter
from device.stream_queue import ROWS
from scheduler.contract import Decode, DecodeFed, Draw, Prefill, Row
from scheduler.effects import MarconiCheckpoint, Quiesce, SyncSecondary
from scheduler.ids import RequestId
from scheduler.request import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CYCLES = 1 << 29
"""A kernel of this many clock cycles takes some tenths of a second."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_model(path)
    return path


def build(folder: Path, blocks: int = 40) -> AsyncRouter:
    return AsyncRouter(build_tiny(folder, device="cuda", total_blocks=blocks, slots=8, spill_bytes=1 << 24))


@pytest.mark.parametrize("name", SCENARIOS)
def test_streams_are_those_of_the_synchronous_router(folder: Path, name: str) -> None:
    scenario = SCENARIOS[name]
    sync = build_tiny(folder, device="cuda", total_blocks=scenario.blocks, slots=8, spill_bytes=1 << 24)
    router = build(folder, scenario.blocks)
    played = play(scenario, router)
    assert played.streams == play(scenario, sync).streams
    expect_depth_two(scenario, played)
    router.teardown()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.8, seed=3),
        SamplingParams(repetition_penalty=1.2, frequency_penalty=0.5),
    ],
)
def test_launching_never_waits_for_the_device(folder: Path, params: SamplingParams) -> None:
    """With the stream held up by a long kernel, both steps are launched before it ends."""
    router = build(folder)
    draw = Draw(params)

    def run(hold: bool) -> list[tuple[int | None, ...]]:
        row = Row(RequestId("a"), [1, 2, 3, 4, 5], 4, 5, [0, 1], draw, slot=0, prompt_tokens=4)
        router.await_result(router.launch(Prefill((Row(RequestId("a"), row.known, 0, 4, row.blocks, None, slot=0),))))
        held = torch.cuda.Event()
        if hold:
            torch.cuda._sleep(CYCLES)
            held.record()
        first = router.launch(Decode((row,)))
        second = router.launch(DecodeFed((row,), (draw,)))
        if hold:
            assert not held.query(), "a launch waited for the device"
        return [router.await_result(ticket).tokens for ticket in (first, second)]

    wanted = run(hold=False)
    assert run(hold=True) == wanted
    router.teardown()


def test_a_readback_slot_grows(folder: Path) -> None:
    rows = ROWS + 44
    router = build(folder, blocks=rows)
    plan = Prefill(tuple(Row(RequestId(f"r{i}"), [i % 60, 1], 0, 2, [i], Draw(SamplingParams())) for i in range(rows)))
    tokens = router.await_result(router.launch(plan)).tokens
    assert len(tokens) == rows
    assert None not in tokens
    router.teardown()


def test_a_step_waits_for_copies_behind_a_fence(folder: Path) -> None:
    router = build(folder)
    lane = router._inner.effects.lane
    source, target = torch.ones(1 << 20, device="cuda"), torch.zeros(1 << 20, device="cuda")

    def copy() -> None:
        torch.cuda._sleep(CYCLES)
        target.copy_(source)

    lane.submit(copy)
    router.apply(SyncSecondary())
    seen = target.sum()  # on the stream of the steps
    assert float(seen) == 1 << 20
    router.apply(Quiesce())
    router.apply(MarconiCheckpoint(RequestId("a"), 0, 4, 0))
    router.teardown()


def test_many_steps_leave_the_same_cache(folder: Path) -> None:
    """Decodes of four sequences, fed at random, against the synchronous router."""
    rng = random.Random(1)
    router, draw = build(folder), Draw(SamplingParams())
    sync = build_tiny(folder, device="cuda", total_blocks=40)
    tables = [[10 * i + j for j in range(10)] for i in range(4)]
    plain, ahead = ([[i] for i in range(4)] for _ in range(2))

    def rows(known: list[list[int]]) -> tuple[Row, ...]:
        parts = zip(known, tables, strict=True)
        return tuple(Row(RequestId(f"{t}"), own, len(own) - 1, len(own), t, draw) for own, t in parts)

    def settle(known: list[list[int]], tokens: tuple[int | None, ...]) -> None:
        for own, token in zip(known, tokens, strict=True):
            assert token is not None
            own.append(token)

    for _ in range(30):
        settle(plain, sync.await_result(sync.launch(Decode(rows(plain)))).tokens)
    while len(ahead[0]) < 31:
        running = rows(ahead)
        tickets = [router.launch(Decode(running))]
        if len(ahead[0]) < 30 and rng.random() < 0.7:
            tickets.append(router.launch(DecodeFed(running, (draw,) * 4)))
        for ticket in tickets:
            settle(ahead, router.await_result(ticket).tokens)
    assert plain == ahead
    assert torch.equal(sync.pool.tensor, router.pool.tensor)
    router.teardown()
