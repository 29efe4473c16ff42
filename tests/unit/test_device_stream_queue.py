"""The CUDA queue's logic without CUDA: issue, feed, readback slots and faults. Its events are in tests/gpu."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from device_scenarios import SCENARIOS, expect_depth_two, play
from rows import make_row
from tiny_model import build_tiny, save_tiny_model

from device import stream_queue
from device.async_router import AsyncRouter
from device.kv_pool import KvPool
from device.stream_queue import StreamQueue
from scheduler.contract import Decode, DecodeFed, DeviceError, DeviceIo, Draw, Fault, Row
from scheduler.request import SamplingParams

GREEDY = Draw(SamplingParams())


class Slot:
    """Stands for page-locked memory. fails: whether the next wait does."""

    made: ClassVar[list["Slot"]] = []

    def __init__(self) -> None:
        self.fails = False
        self._ids = torch.empty(0, dtype=torch.int64)
        Slot.made.append(self)

    def start(self, ids: torch.Tensor) -> None:
        self._ids = ids.clone()

    def wait(self) -> list[int]:
        if self.fails:
            raise RuntimeError("an illegal memory access was encountered")
        ids: list[int] = self._ids.tolist()
        return ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_model(path)
    return path


@pytest.fixture
def router(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AsyncRouter]:
    monkeypatch.setattr(stream_queue, "_Slot", Slot)
    monkeypatch.setattr(StreamQueue, "drain", lambda self: None)
    Slot.made = []
    scenario = SCENARIOS["spilled"]
    inner = build_tiny(folder, total_blocks=scenario.blocks, slots=8, spill_bytes=1 << 20)
    built = AsyncRouter(inner)
    built._queue = StreamQueue(inner.runner, inner.effects.lane)
    yield built
    built.teardown()


def row(tokens: list[int], start: int, blocks: list[int]) -> Row:
    return make_row("a", tokens, start, blocks, GREEDY)


def test_streams_are_those_of_the_synchronous_router(router: AsyncRouter, folder: Path) -> None:
    scenario = SCENARIOS["spilled"]
    sync = build_tiny(folder, total_blocks=scenario.blocks, slots=8, spill_bytes=1 << 20)
    played = play(scenario, router)
    assert played.streams == play(scenario, sync).streams
    expect_depth_two(scenario, played)
    sync.teardown()


def test_a_failed_wait_is_a_readback_fault_and_frees_its_slot(router: AsyncRouter) -> None:
    for slot in Slot.made:
        slot.fails = True
    running = row([5], 4, [0, 1])
    for _ in range(4):
        tickets = router.launch(Decode((running,))), router.launch(DecodeFed((running,), (GREEDY,)))
        for ticket in tickets:
            with pytest.raises(DeviceError, match="illegal memory access") as caught:
                router.await_result(ticket)
            assert caught.value.fault is Fault.READBACK


def test_an_issue_that_fails_is_told_at_once_and_frees_its_slot(
    router: AsyncRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    running = row([5], 4, [0, 1])
    wanted = router.await_result(router.launch(Decode((running,)))).tokens
    flying = router.launch(Decode((running,)))
    for _ in range(4):
        with monkeypatch.context() as patch:
            patch.setattr(KvPool, "write", fail)
            with pytest.raises(DeviceError, match="out of memory") as caught:
                router.launch(DecodeFed((running,), (GREEDY,)))
        assert caught.value.fault is Fault.FORWARD
    ahead = router.launch(DecodeFed((running,), (GREEDY,)))
    assert router.await_result(flying).tokens == wanted
    router.await_result(ahead)


def test_an_overflow_is_noticed_when_it_is_read(router: DeviceIo) -> None:
    """The fed step behind it runs on a token that stands for none; nobody may see what it brings."""
    router.pool.tensor[0] = float("nan")  # type: ignore[attr-defined]
    running = row([5], 4, [0, 1])
    tickets = router.launch(Decode((running,))), router.launch(DecodeFed((running,), (GREEDY,)))
    for ticket in tickets:
        with pytest.raises(DeviceError, match="not finite") as caught:
            router.await_result(ticket)
        assert caught.value.fault is Fault.READBACK
    assert router.pool.tensor.isfinite().all()  # type: ignore[attr-defined]
