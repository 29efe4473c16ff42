"""The router's effects on a tiny random model: blocks are copied, leave and come back, and refusals change nothing."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rows import make_row
from tiny_model import build_tiny, save_tiny_model

from device.build import build_router
from device.errors import DeviceSetupError
from device.kv_pool import KvPool
from device.router import SyncRouter
from scheduler.contract import Decode, DeviceError, Draw, Fault, Prefill
from scheduler.device_config import DeviceConfig
from scheduler.effects import (
    CopyBlocks,
    Done,
    DropSequenceState,
    Effect,
    Exhausted,
    Quiesce,
    RestoreSequenceState,
    Saved,
    SaveSequenceState,
)
from scheduler.ids import BlockId, RequestId
from scheduler.request import SamplingParams

DRAW = Draw(SamplingParams())
ROOM = 100_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_model(path)
    return path


@pytest.fixture(params=["host", "disk"])
def router(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> Iterator[SyncRouter]:
    built = build_tiny(folder, spill_bytes=ROOM, spill_path=tmp_path if request.param == "disk" else None)
    yield built
    built.teardown()


@pytest.fixture
def on_disk(folder: Path, tmp_path: Path) -> Iterator[SyncRouter]:
    built = build_tiny(folder, spill_bytes=ROOM, spill_path=tmp_path)
    yield built
    built.teardown()


def ids(blocks: Sequence[int]) -> tuple[BlockId, ...]:
    return tuple(BlockId(block) for block in blocks)


def save(name: str, blocks: Sequence[int], tokens: int) -> SaveSequenceState:
    return SaveSequenceState(RequestId(name), ids(blocks), tokens)


def restore(name: str, blocks: Sequence[int], tokens: int) -> RestoreSequenceState:
    return RestoreSequenceState(RequestId(name), ids(blocks), tokens)


def drop(name: str) -> DropSequenceState:
    return DropSequenceState(RequestId(name))


def copy(*pairs: tuple[int, int]) -> CopyBlocks:
    return CopyBlocks(tuple((BlockId(source), BlockId(target)) for source, target in pairs))


def prefill(router: SyncRouter, tokens: list[int], blocks: list[int], name: str = "a") -> None:
    router.await_result(router.launch(Prefill((make_row(name, tokens, 0, blocks),))))


def decode(router: SyncRouter, past: list[int], token: int, blocks: list[int]) -> int:
    row = make_row("a", [token], len(past), blocks, DRAW, past)
    (drawn,) = router.await_result(router.launch(Decode((row,)))).tokens
    assert drawn is not None
    return drawn


def fill(router: SyncRouter) -> torch.Tensor:
    """A pool in which no block is like another; returns a copy of it."""
    router.pool.tensor.normal_(generator=torch.Generator().manual_seed(0))
    return router.pool.tensor.clone()


def refused(router: SyncRouter, effect: Effect) -> str:
    """What the error says; no block may have changed."""
    before = router.pool.tensor.clone()
    with pytest.raises(DeviceError) as caught:
        router.apply(effect)
    assert caught.value.fault is Fault.EFFECT
    assert torch.equal(router.pool.tensor, before)
    return str(caught.value)


@pytest.mark.parametrize("length", [1, 4, 5, 9])
def test_a_sequence_goes_on_in_other_blocks_as_if_nothing_had_been(router: SyncRouter, length: int) -> None:
    tokens, used = list(range(7, 7 + length)), -(-length // 4)
    blocks, moved = [3, 8, 1, 6], [0, 6, 2, 9]
    prefill(router, tokens, blocks)
    wanted = decode(router, tokens, 5, blocks)
    prefill(router, tokens, blocks)
    saved = router.apply(save("a", blocks[:used], length))
    assert isinstance(saved, Saved)
    assert saved.size >= used * router.facts().block_bytes
    prefill(router, [59, 58, 57, 56] * 3, blocks, "b")
    assert decode(router, tokens, 5, blocks) != wanted
    assert router.apply(restore("a", moved[:used], length)) == Done()
    assert decode(router, tokens, 5, moved) == wanted
    assert "no state of it is saved" in refused(router, restore("a", moved[:used], length))


def test_only_the_given_blocks_are_written(router: SyncRouter) -> None:
    before = fill(router)
    router.apply(save("a", [2, 7], 8))
    assert torch.equal(router.pool.tensor, before)
    router.apply(restore("a", [11, 0], 8))
    assert torch.equal(router.pool.tensor[[11, 0]], before[[2, 7]])
    assert torch.equal(router.pool.tensor[1:11], before[1:11])


def test_blocks_are_copied_exactly_and_in_order(router: SyncRouter) -> None:
    before = fill(router)
    assert router.apply(copy((3, 5), (5, 0), (9, 3))) == Done()
    assert torch.equal(router.pool.tensor[[5, 0, 3]], before[[3, 3, 9]])
    others = [1, 2, 4, 6, 7, 8, 9, 10, 11]
    assert torch.equal(router.pool.tensor[others], before[others])
    assert router.apply(copy()) == Done()


def test_a_writer_gets_the_copy_and_the_owner_keeps_the_block(router: SyncRouter) -> None:
    prefill(router, [1, 2, 3, 4, 5], [0, 1])
    wanted = decode(router, [1, 2, 3, 4, 5], 6, [0, 1])
    prefill(router, [1, 2, 3, 4, 5], [0, 1])
    router.apply(copy((1, 2)))
    other = decode(router, [1, 2, 3, 4, 5], 50, [0, 2])
    assert decode(router, [1, 2, 3, 4, 5], 6, [0, 1]) == wanted
    assert other == decode(router, [1, 2, 3, 4, 5], 50, [0, 1])


@pytest.mark.parametrize(
    ("effect", "message"),
    [
        (copy((0, 12)), "a copy: block id 12 is outside 0 to 11"),
        (copy((0, 1), (-1, 2)), "a copy: block id -1 is outside 0 to 11"),
        (copy((0, 1), (4, 4)), "a copy of block 4 onto itself"),
        (copy((0, 1), (2, 3), (4, 1)), "a copy: block 1 stands there 2 times"),
        (save("b", [0, 12], 8), "b: block id 12"),
        (save("b", [-1, 2], 8), "b: block id -1"),
        (save("b", [3, 3], 8), "b: block 3 stands there 2 times"),
        (save("b", [0, 1], 9), "b: 9 tokens fill 3 blocks of 4, 2 were given"),
        (save("b", [0, 1], 4), "b: 4 tokens fill 1 blocks of 4, 2 were given"),
        (save("b", [], 0), "b: a state of 0 tokens"),
        (save("a", [0, 1], 8), "a: its state is saved already"),
        (restore("b", [0, 1], 8), "b: no state of it is saved"),
    ],
)
def test_invalid_effects_say_what_is_wrong_and_change_nothing(router: SyncRouter, effect: Effect, message: str) -> None:
    before = fill(router)
    router.apply(save("a", [4, 5], 8))
    assert message in refused(router, effect)
    router.apply(restore("a", [6, 7], 8))
    assert torch.equal(router.pool.tensor[[6, 7]], before[[4, 5]])
    assert isinstance(router.apply(save("b", [0, 1], 8)), Saved)


@pytest.mark.parametrize(
    "effect",
    [
        restore("a", [0, 1], 7),
        restore("a", [0, 1, 2], 9),
        restore("a", [0], 8),
        restore("a", [0, 12], 8),
        restore("a", [0, 0], 8),
        restore("a", [0, -1], 8),
    ],
)
def test_a_refused_restore_changes_no_block_and_drops_the_state(router: SyncRouter, effect: Effect) -> None:
    fill(router)
    router.apply(save("a", [4, 5], 8))
    assert "a: " in refused(router, effect)
    assert "no state of it is saved" in refused(router, restore("a", [0, 1], 8))
    assert isinstance(router.apply(save("a", [4, 5], 8)), Saved)


def test_a_damaged_file_changes_no_block(on_disk: SyncRouter, tmp_path: Path) -> None:
    fill(on_disk)
    on_disk.apply(save("a", [4, 5], 8))
    (path,) = tmp_path.rglob("*.kv")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert "checksum" in refused(on_disk, restore("a", [0, 1], 8))
    assert not list(tmp_path.rglob("*.kv"))


def test_room_is_counted_and_comes_back(folder: Path) -> None:
    block_bytes = build_tiny(folder).facts().block_bytes
    router = build_tiny(folder, spill_bytes=3 * block_bytes)
    assert router.apply(save("a", [0, 1], 8)) == Saved(2 * block_bytes)
    assert router.apply(save("b", [2, 3], 8)) == Exhausted()
    assert router.apply(save("b", [2], 4)) == Saved(block_bytes)
    assert router.apply(drop("a")) == Done()
    assert router.apply(drop("a")) == Done()
    assert router.apply(save("c", [2, 3], 8)) == Saved(2 * block_bytes)


def test_without_room_nothing_is_read_from_the_device(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    router = build_tiny(folder)
    monkeypatch.setattr(KvPool, "read_blocks", failing)
    assert router.apply(save("a", [0, 1], 8)) == Exhausted()
    assert "no state of it is saved" in refused(router, restore("a", [0, 1], 8))


def failing(*_: Any) -> None:
    raise RuntimeError("the device is ill")


@pytest.mark.parametrize(
    ("method", "effect"),
    [
        ("copy_blocks", copy((0, 1))),
        ("read_blocks", save("b", [0], 4)),
        ("write_blocks", restore("a", [0], 4)),
    ],
)
def test_a_failing_device_is_an_effect_fault(
    router: SyncRouter, monkeypatch: pytest.MonkeyPatch, method: str, effect: Effect
) -> None:
    router.apply(save("a", [4], 4))
    with monkeypatch.context() as patch:
        patch.setattr(KvPool, method, failing)
        assert "the device is ill" in refused(router, effect)
    assert isinstance(router.apply(save("b", [0], 4)), Saved)


def test_nothing_is_left_and_nothing_works_after_teardown(folder: Path, tmp_path: Path) -> None:
    router = build_tiny(folder, spill_bytes=ROOM, spill_path=tmp_path)
    router.apply(save("a", [0], 4))
    assert list(tmp_path.rglob("*.kv"))
    router.teardown()
    assert not list(tmp_path.iterdir())
    effects: list[Effect] = [Quiesce(), copy((0, 1)), save("b", [0], 4), restore("a", [0], 4), drop("a")]
    for effect in effects:
        with pytest.raises(DeviceError, match="torn down") as caught:
            router.apply(effect)
        assert caught.value.fault is Fault.EFFECT


@pytest.fixture
def threads() -> Iterator[int]:
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


@pytest.fixture
def configured(folder: Path, threads: int) -> Callable[..., DeviceConfig]:
    def configure(**options: Any) -> DeviceConfig:
        return DeviceConfig(str(folder), "tiny", "cpu", "fp32", "torch", 4, 1 << 16, None, threads, **options)

    return configure


def test_the_configuration_says_where_and_how_much(configured: Callable[..., DeviceConfig], tmp_path: Path) -> None:
    assert build_router(configured()).apply(save("a", [0], 4)) == Exhausted()
    assert isinstance(build_router(configured(spill_bytes=ROOM)).apply(save("a", [0], 4)), Saved)
    router = build_router(configured(spill_bytes=ROOM, spill_path=str(tmp_path / "spill")))
    assert isinstance(router.apply(save("a", [0], 4)), Saved)
    assert len(list((tmp_path / "spill").rglob("*.kv"))) == 1
    router.teardown()


def test_a_spill_path_that_is_no_folder_is_a_setup_error(
    configured: Callable[..., DeviceConfig], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DeviceSetupError, match="no spill folder"):
        build_router(configured(spill_bytes=ROOM, spill_path=str(tmp_path / "file")))
