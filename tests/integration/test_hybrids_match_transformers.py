"""Models with recurrent layers draw the tokens that `transformers.generate` draws, wherever their state has been."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from driven import Driven, run, run_mixed, step
from reference import generate
from tiny_hybrids import HYBRIDS, VOCABULARY, build_hybrid, save_hybrid
from transformers import AutoModelForCausalLM

from device.router import SyncRouter
from scheduler.contract import DeviceError, Fault
from scheduler.effects import (
    CompactSlot,
    Done,
    EffectOutcome,
    MarconiCheckpoint,
    ReleaseSeq,
    RestoreSequenceState,
    Saved,
    SaveSequenceState,
    SsmSnapshotRestore,
    SsmSnapshotSave,
)
from scheduler.ids import BlockId

NEW_TOKENS = 8
MAIN = ("bamba", "qwen3-next")


class Reference:
    """`transformers.generate`, greedy, fp32. Answers are remembered."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._answers: dict[tuple[int, ...], list[int]] = {}

    def __call__(self, prompt: list[int]) -> list[int]:
        key = tuple(prompt)
        if key not in self._answers:
            (self._answers[key],) = generate(self._model, [prompt], NEW_TOKENS)
        return self._answers[key]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Reference]]:
    made: dict[str, tuple[Path, Reference]] = {}

    def get(name: str) -> tuple[Path, Reference]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            save_hybrid(name, folder)
            made[name] = folder, Reference(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
        return made[name]

    return get


@pytest.fixture(params=MAIN)
def folder(request: pytest.FixtureRequest, models: Callable[[str], tuple[Path, Reference]]) -> Path:
    return models(request.param)[0]


@pytest.fixture
def answer(request: pytest.FixtureRequest, folder: Path, models: Callable[[str], tuple[Path, Reference]]) -> Reference:
    return models(request.node.callspec.params["folder"])[1]


@pytest.fixture
def router(folder: Path) -> SyncRouter:
    return build_hybrid(folder)


def prompt_of(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(length)]


def ids(blocks: list[int]) -> tuple[BlockId, ...]:
    return tuple(BlockId(block) for block in blocks)


def used(sequence: Driven) -> tuple[BlockId, ...]:
    """The blocks with KV in them."""
    return ids(sequence.blocks[: -(-sequence.computed // 4)])


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 8, 22, 23])
def test_a_prompt_may_be_cut_anywhere(router: SyncRouter, answer: Reference, chunk: int) -> None:
    prompt = prompt_of(0, 23)
    sequence = Driven("a", prompt, list(range(9, 0, -1)), slot=3)
    assert run(router, sequence, NEW_TOKENS, chunk) == answer(prompt)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", HYBRIDS)
def test_sequences_in_company_draw_what_they_draw_alone(
    models: Callable[[str], tuple[Path, Reference]], name: str, seed: int
) -> None:
    """Twice in the same slots: a new sequence begins from zeros whatever its slot holds."""
    folder, answer = models(name)
    router, rng = build_hybrid(folder), random.Random(seed)
    for turn in range(2):
        prompts = [prompt_of(10 * seed + turn + length, length) for length in (1, 2, 7, 12, 19)]
        free, slots = rng.sample(range(40), 40), rng.sample(range(6), 5)
        sequences = [
            Driven(f"r{slot}", p, [free.pop() for _ in range(7)], slot) for p, slot in zip(prompts, slots, strict=True)
        ]
        run_mixed(router, sequences, NEW_TOKENS, rng)
        assert [s.drawn for s in sequences] == [answer(prompt) for prompt in prompts]


def test_slots_are_compacted_between_steps(router: SyncRouter, answer: Reference) -> None:
    """Two sequences move on to lower slots, one of them amid its prompt, when a third is over."""
    prompts = [prompt_of(seed, length) for seed, length in ((1, 6), (2, 17), (3, 9))]
    over, long, short = (
        Driven(f"r{i}", prompt, list(range(10 * i, 10 * i + 7)), slot)
        for i, (prompt, slot) in enumerate(zip(prompts, (0, 4, 2), strict=True))
    )
    step(router, [(over, 6), (long, 5), (short, 9)])
    step(router, [(over, 1), (long, 3), (short, 1)])
    assert router.apply(ReleaseSeq(over.request_id, over.slot, "test")) == Done()
    for sequence, target in ((long, 0), (short, 1)):
        assert router.apply(CompactSlot(sequence.request_id, sequence.slot, target)) == Done()
        assert router.apply(ReleaseSeq(sequence.request_id, sequence.slot, "the old place")) == Done()
        sequence.slot = target
    step(router, [(short, 1), (long, 4)])
    step(router, [(short, 1), (long, 5)])
    while len(long.drawn) < NEW_TOKENS:
        step(router, [(long, 1)])
    assert run(router, short, NEW_TOKENS) == answer(prompts[2])
    assert long.drawn == answer(prompts[1])


@pytest.mark.parametrize("where", ["host", "disk"])
@pytest.mark.parametrize("cut", [7, 17, 20])
def test_a_spilled_sequence_goes_on_elsewhere(
    folder: Path, answer: Reference, tmp_path: Path, where: str, cut: int
) -> None:
    """Saved amid its prompt, at its end or after it; blocks and slot are then another's."""
    router = build_hybrid(folder, spill_bytes=1 << 20, spill_path=tmp_path if where == "disk" else None)
    prompt, other_prompt = prompt_of(4, 17), prompt_of(5, 17)
    sequence = Driven("a", prompt, list(range(7)), slot=1)
    while sequence.computed < cut:
        step(router, [(sequence, min(7, cut - sequence.computed, len(sequence.tokens) - sequence.computed))])
    saved = router.apply(SaveSequenceState(sequence.request_id, used(sequence), cut, sequence.slot))
    assert isinstance(saved, Saved)
    facts = router.facts()
    assert saved.size >= len(used(sequence)) * facts.block_bytes + facts.slot_bytes
    router.apply(ReleaseSeq(sequence.request_id, sequence.slot, "spill"))
    other = Driven("b", other_prompt, list(range(7)), slot=1)
    assert run(router, other, NEW_TOKENS) == answer(other_prompt)
    sequence.blocks, sequence.slot = list(range(30, 23, -1)), 5
    assert router.apply(RestoreSequenceState(sequence.request_id, used(sequence), cut, sequence.slot)) == Done()
    assert run(router, sequence, NEW_TOKENS) == answer(prompt)


def checkpoint(router: SyncRouter, sequence: Driven, snapshot: int) -> EffectOutcome:
    return router.apply(MarconiCheckpoint(sequence.request_id, sequence.slot, sequence.computed, snapshot))


def test_a_shared_prefix_is_continued_from_its_checkpoint(router: SyncRouter, answer: Reference) -> None:
    """Three full blocks are shared; the state after them comes from the snapshot, twice."""
    prefix = prompt_of(6, 12)
    first, *others = ([*prefix, *prompt_of(seed, length)] for seed, length in ((7, 5), (8, 4), (9, 1)))
    owner = Driven("owner", first, list(range(7)), slot=0)
    step(router, [(owner, 12)])
    assert checkpoint(router, owner, 2) == Done()
    assert run(router, owner, NEW_TOKENS) == answer(first)
    router.apply(ReleaseSeq(owner.request_id, owner.slot, "done"))
    for slot, prompt in ((3, others[0]), (0, others[1])):
        sequence = Driven("next", prompt, [*owner.blocks[:3], *range(20, 24)], slot, computed=12)
        assert router.apply(SsmSnapshotRestore(sequence.request_id, slot, 2)) == Done()
        assert run(router, sequence, NEW_TOKENS) == answer(prompt)


def test_a_sequence_goes_back_to_a_snapshot(router: SyncRouter, answer: Reference) -> None:
    """What it took in since is as if it had never been."""
    prompt = prompt_of(12, 11)
    sequence = Driven("a", prompt, list(range(7)), slot=4)
    step(router, [(sequence, 11)])
    step(router, [(sequence, 1)])
    assert router.apply(SsmSnapshotSave(sequence.request_id, 4, 0)) == Done()
    rest = run(router, sequence, NEW_TOKENS)
    sequence.tokens, sequence.computed = sequence.tokens[: 11 + 2], 12
    assert router.apply(SsmSnapshotRestore(sequence.request_id, 4, 0)) == Done()
    assert run(router, sequence, NEW_TOKENS) == rest == answer(prompt)


def hand_over(source: SyncRouter, sequence: Driven, target: SyncRouter, blocks: list[int], slot: int) -> Driven:
    """What a transport does: it copies the bytes of blocks and of the slot, and knows nothing else."""
    size, record = source.facts().block_bytes, source.facts().slot_bytes
    there, here = target.pool.bytes_view(), source.pool.bytes_view()
    for old, new in zip(used(sequence), blocks, strict=False):
        there[new * size : (new + 1) * size] = here[old * size : (old + 1) * size]
    first, origin = target.pool.slot_offset(slot), source.pool.slot_offset(sequence.slot)
    there[first : first + record] = here[origin : origin + record]
    moved = Driven(sequence.name, sequence.tokens, blocks, slot, sequence.computed)
    moved.prompt_length = sequence.prompt_length
    return moved


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_sequence_goes_on_on_another_router(folder: Path, router: SyncRouter, answer: Reference, steps: int) -> None:
    prompt = prompt_of(13, 14)
    other = build_hybrid(folder, total_blocks=25, slots=3)
    resident = Driven("b", prompt_of(14, 9), list(range(7)), slot=1)
    step(other, [(resident, 9)])
    sequence = Driven("a", prompt, list(range(12, 19)), slot=5)
    step(router, [(sequence, 14)])
    for _ in range(steps):
        step(router, [(sequence, 1)])
    moved = hand_over(router, sequence, other, list(range(24, 17, -1)), 2)
    while len(moved.drawn) < NEW_TOKENS:
        step(other, [(resident, 1), (moved, 1)] if len(resident.drawn) < NEW_TOKENS else [(moved, 1)])
    assert moved.drawn == answer(prompt)
    assert resident.drawn == answer(resident.tokens[:9])[: len(resident.drawn)]


def test_blocks_without_their_state_are_refused(folder: Path, router: SyncRouter) -> None:
    other = build_hybrid(folder)
    sequence = Driven("a", prompt_of(15, 14), list(range(7)), slot=5)
    step(router, [(sequence, 14)])
    moved = hand_over(router, sequence, other, list(range(7)), 2)
    moved.slot = 4
    with pytest.raises(DeviceError, match="begins at position 14, the state in slot 4 has seen 0 tokens") as caught:
        step(other, [(moved, 1)])
    assert caught.value.fault is Fault.FORWARD


def test_the_state_matters(folder: Path, router: SyncRouter, answer: Reference) -> None:
    """The control: with the right blocks, and zeros where the state should be, the answer is another one."""
    prompt = prompt_of(13, 14)
    other = build_hybrid(folder)
    sequence = Driven("a", prompt, list(range(7)), slot=5)
    step(router, [(sequence, 14)])
    moved = hand_over(router, sequence, other, list(range(7)), 2)
    first = other.pool.slot_offset(2)
    other.pool.bytes_view()[first : first + other.facts().slot_bytes] = 0
    other.pool.bytes_view()[first : first + 8].view(np.int64)[0] = 14
    assert run(other, moved, NEW_TOKENS) != answer(prompt)
