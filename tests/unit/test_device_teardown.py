"""A device is given up from the outside in: steps, mirror ranks, copies, spilled states, then the memory.

Item 10 of the device contract's conformance checklist.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rows import make_row
from tiny_model import build_tiny, save_tiny_model

from device.async_router import AsyncRouter
from device.copy_lane import ThreadLane
from device.router import SyncRouter
from device.spill_disk import DiskStore
from device.step_queue import ThreadQueue
from scheduler.contract import Decode, DeviceError, DeviceIo, Draw, Prefill
from scheduler.effects import MarconiCheckpoint, Saved, SaveSequenceState
from scheduler.ids import BlockId, RequestId
from scheduler.request import SamplingParams
from scheduler.shutdown import shut_down

A = RequestId("a")
ORDER = ["mirror", "steps", "copies", "spilled states"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_model(path)
    return path


class Closings:
    """The order in which a router's parts end, each while the memory is still there. failing: what raises then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        self.failing: set[str] = set()
        self.inner: SyncRouter | None = None
        parts = {"steps": ThreadQueue, "copies": ThreadLane, "spilled states": DiskStore}
        for name, part in parts.items():
            monkeypatch.setattr(part, "close", self._watched(name, part.close))

    def _watched(self, name: str, close: Callable[[Any], None]) -> Callable[[Any], None]:
        def closing(part: Any) -> None:
            self.note(name)
            close(part)
            if name in self.failing:
                raise RuntimeError(f"{name}: the device context is lost")

        return closing

    def note(self, name: str) -> None:
        self.seen.append(name)
        assert self.inner is not None
        assert self.inner.pool.tensor.numel()

    def build(self, router: str, folder: Path, spill: Path) -> DeviceIo:
        """With a state in its spill store, a copy beside the steps and, at depth 2, a step in flight."""
        self.inner = build_tiny(
            folder, slots=4, spill_bytes=1 << 20, spill_path=spill, mirrors=[lambda: self.note("mirror")]
        )
        built: DeviceIo = AsyncRouter(self.inner) if router == "async" else self.inner
        first = make_row("a", [1, 2, 3], 0, [0], Draw(SamplingParams()))
        built.await_result(built.launch(Prefill((first,))))
        assert isinstance(built.apply(SaveSequenceState(A, (BlockId(0),), 3)), Saved)
        built.apply(MarconiCheckpoint(A, 0, 3, 0))
        if router == "async":
            built.launch(Decode((make_row("a", [4], 3, [0], Draw(SamplingParams())),)))
        return built


@pytest.fixture
def closings(monkeypatch: pytest.MonkeyPatch) -> Closings:
    return Closings(monkeypatch)


def order_of(router: str) -> list[str]:
    return [part for part in ORDER if part != "steps" or router == "async"]


@pytest.mark.parametrize("router", ["sync", "async"])
def test_the_memory_goes_last(router: str, closings: Closings, folder: Path, tmp_path: Path) -> None:
    device = closings.build(router, folder, tmp_path)
    assert list(tmp_path.iterdir())
    reports: list[str] = []
    shut_down(device, lambda what, _: reports.append(what))
    assert closings.seen == order_of(router)
    assert reports == []
    require_gone(closings, tmp_path)


@pytest.mark.parametrize("failing", [{"steps"}, {"copies"}, {"spilled states"}, {"steps", "copies", "spilled states"}])
def test_whatever_fails_on_the_way_the_memory_goes(
    failing: set[str], closings: Closings, folder: Path, tmp_path: Path
) -> None:
    """A lost device context fails every wait; what is on disk must not stay because of it."""
    device = closings.build("async", folder, tmp_path)
    closings.failing = failing
    reports: dict[str, Exception] = {}
    shut_down(device, reports.__setitem__)
    assert closings.seen == ORDER
    assert list(reports) == ["teardown"]
    assert "context is lost" in str(reports["teardown"])
    require_gone(closings, tmp_path)


def require_gone(closings: Closings, spill: Path) -> None:
    assert closings.inner is not None
    with pytest.raises(DeviceError, match="torn down"):
        _ = closings.inner.pool
    assert list(spill.iterdir()) == []
