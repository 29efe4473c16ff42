"""Models with recurrent layers: the same answers on CUDA as on a CPU, and state that may be moved and copied."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from driven import Driven, run, run_mixed, step
from tiny_hybrids import VOCABULARY, build_hybrid, save_hybrid

from scheduler.effects import (
    CompactSlot,
    MarconiCheckpoint,
    ReleaseSeq,
    RestoreSequenceState,
    Saved,
    SaveSequenceState,
    SsmSnapshotRestore,
)
from scheduler.ids import BlockId

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

NEW_TOKENS = 8


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.fixture(scope="module", params=["bamba", "qwen3-next"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(str(request.param))
    save_hybrid(request.param, path)
    return path


def prompt_of(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(length)]


def ids(blocks: list[int]) -> tuple[BlockId, ...]:
    return tuple(BlockId(block) for block in blocks)


@pytest.mark.parametrize("seed", range(2))
def test_tokens_equal_those_of_a_cpu(folder: Path, seed: int) -> None:
    drawn = []
    for device in ("cuda", "cpu"):
        sequences = [
            Driven(f"r{i}", prompt_of(length, length), list(range(7 * i, 7 * i + 7)), slot)
            for i, (length, slot) in enumerate(zip((1, 2, 7, 12, 19), (5, 1, 0, 2, 3), strict=True))
        ]
        run_mixed(build_hybrid(folder, device=device), sequences, NEW_TOKENS, random.Random(seed))
        drawn.append([sequence.drawn for sequence in sequences])
    assert drawn[0] == drawn[1]


def test_a_state_may_be_anywhere_in_between(folder: Path, tmp_path: Path) -> None:
    """Moved, spilled, checkpointed and copied as bytes, without a Quiesce anywhere."""
    router = build_hybrid(folder, device="cuda", spill_bytes=1 << 24, spill_path=tmp_path)
    prompt = prompt_of(3, 12)
    wanted = run(build_hybrid(folder), Driven("a", prompt, list(range(7)), 0), NEW_TOKENS)
    sequence = Driven("a", prompt, list(range(7)), slot=4)
    step(router, [(sequence, 12)])
    router.apply(MarconiCheckpoint(sequence.request_id, 4, 12, 1))
    router.apply(CompactSlot(sequence.request_id, 4, 0))
    assert isinstance(router.apply(SaveSequenceState(sequence.request_id, ids([0, 1, 2]), 12, 0)), Saved)
    run(router, Driven("b", prompt_of(4, 12), list(range(7)), slot=0), NEW_TOKENS)
    sequence.blocks, sequence.slot = list(range(20, 27)), 5
    router.apply(RestoreSequenceState(sequence.request_id, ids([20, 21, 22]), 12, 5))
    spilled = Driven("a", sequence.tokens, sequence.blocks, 5, computed=12)
    spilled.prompt_length = 12
    memory, size = router.pool.bytes_view(), router.facts().slot_bytes
    here, there = router.pool.slot_offset(5), router.pool.slot_offset(2)
    memory[there : there + size] = memory[here : here + size]
    assert run(router, spilled, NEW_TOKENS) == wanted
    router.apply(ReleaseSeq(sequence.request_id, 5, "done"))
    router.apply(SsmSnapshotRestore(sequence.request_id, 3, 1))
    for slot in (2, 3):
        again = Driven("c", [*prompt, wanted[0]], sequence.blocks, slot, computed=12)
        assert run(router, again, NEW_TOKENS - 1) == wanted[1:]


def test_slots_are_part_of_the_flat_device_bytes(folder: Path) -> None:
    router = build_hybrid(folder, device="cuda")
    memory, facts = router.pool.bytes_view(), router.facts()
    assert memory.__cuda_array_interface__["shape"] == (router.pool.slot_offset(5) + facts.slot_bytes,)
    router.pool.slot_memory[3] = 1
    assert memory.nonzero().min() == router.pool.slot_offset(3)
    assert memory.nonzero().max() == router.pool.slot_offset(4) - 1
