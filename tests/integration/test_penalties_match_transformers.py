"""Greedy tokens under penalties are those of a plain loop over transformers' logits, whatever happens to a sequence."""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, RepetitionPenaltyLogitsProcessor

from device.async_router import AsyncRouter
from device.router import SyncRouter, build_sync_router
from scheduler.contract import Decode, DecodeFed, DeviceIo, Draw, Prefill, Row
from scheduler.effects import NO_SLOT, CompactSlot, ReleaseSeq, RestoreSequenceState, Saved, SaveSequenceState
from scheduler.ids import BlockId, RequestId
from scheduler.request import SamplingParams

VOCABULARY, BLOCK_SIZE, TOTAL_BLOCKS, SLOTS, NEW_TOKENS = 199, 4, 96, 8, 30
CONFIG: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # wide, so that greedy choices are not near ties
}
PARAMS = [
    SamplingParams(repetition_penalty=1.6),
    SamplingParams(frequency_penalty=1.5),
    SamplingParams(presence_penalty=2.0),
    SamplingParams(repetition_penalty=1.2, presence_penalty=0.8, frequency_penalty=0.6),
    SamplingParams(repetition_penalty=0.8, presence_penalty=-1.0, frequency_penalty=-0.2),
    SamplingParams(),
]
PROMPTS = [
    [random.Random(i).randrange(VOCABULARY) for _ in range(length)] for i, length in enumerate((1, 4, 7, 13, 20, 9))
]


class Live:
    """A sequence as a scheduler has it: one row, one list, both of which go on."""

    def __init__(self, number: int, slot: int) -> None:
        prompt, self.params = PROMPTS[number], PARAMS[number]
        self.row = Row(RequestId(f"r{number}"), list(prompt), 0, 0, [], None, slot, prompt_tokens=len(prompt))

    @property
    def drawn(self) -> list[int]:
        return list(self.row.known[self.row.prompt_tokens :])

    @property
    def is_done(self) -> bool:
        return len(self.drawn) >= NEW_TOKENS

    @property
    def pending(self) -> int:
        return len(self.row.known) - self.row.start

    def take(self, count: int) -> None:
        """The next step computes so many tokens of it."""
        self.row.end = self.row.start + count
        self.row.draw = Draw(self.params) if self.row.end == len(self.row.known) else None

    def settle(self, token: int | None) -> None:
        self.row.start = self.row.end
        if token is not None:
            self.row.known.append(token)  # type: ignore[attr-defined]  # a list, see above
            self.row.end += 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(7)
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LlamaConfig(**CONFIG)).float().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return [oracle(model, prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


@torch.inference_mode()
def oracle(model: Any, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    ids = list(prompt)
    repetition = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
    for _ in range(NEW_TOKENS):
        given = torch.tensor([ids])
        scores = repetition(given, model(given).logits[:, -1].clone())[0]
        counts = torch.bincount(given[0, len(prompt) :], minlength=VOCABULARY)
        scores -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        ids.append(int(scores.argmax()))
    return ids[len(prompt) :]


@pytest.fixture
def build(folder: Path) -> Iterator[Callable[[], SyncRouter]]:
    built: list[SyncRouter] = []

    def make() -> SyncRouter:
        built.append(
            build_sync_router(
                folder, "tiny", "cpu", "fp32", "torch", BLOCK_SIZE, None, TOTAL_BLOCKS, None, 1 << 24, slots=SLOTS
            )
        )
        return built[-1]

    yield make
    for router in built:
        router.teardown()


class Pool:
    """Blocks and slots, handed out in no order."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.blocks = rng.sample(range(TOTAL_BLOCKS), TOTAL_BLOCKS)
        self.slots = rng.sample(range(SLOTS), SLOTS)

    def table(self, row: Row) -> list[BlockId]:
        """Blocks for the whole life of a row."""
        return [BlockId(self.blocks.pop(0)) for _ in range(-(-(row.prompt_tokens + NEW_TOKENS) // BLOCK_SIZE))]

    def slot(self) -> int:
        return self.slots.pop(self.rng.randrange(len(self.slots)))

    def free(self, row: Row) -> None:
        self.blocks += row.blocks
        self.slots.append(row.slot)


def sequences(pool: Pool, with_slots: bool = True) -> list[Live]:
    live = [Live(number, pool.slot() if with_slots else NO_SLOT) for number in range(len(PROMPTS))]
    for sequence in live:
        sequence.row.blocks = pool.table(sequence.row)
    return live


def step(router: DeviceIo, company: Sequence[Live], rng: random.Random) -> None:
    """One step of these, a chunk of random size from each."""
    for sequence in company:
        sequence.take(rng.randint(1, sequence.pending))
    rows = tuple(sequence.row for sequence in company)
    plan = Decode(rows) if all(row.count == 1 for row in rows) else Prefill(rows)
    for sequence, token in zip(company, router.await_result(router.launch(plan)).tokens, strict=True):
        sequence.settle(token)


def run(router: DeviceIo, live: Sequence[Live], rng: random.Random, between: Callable[[], None] = lambda: None) -> None:
    while unfinished := [sequence for sequence in live if not sequence.is_done]:
        step(router, rng.sample(unfinished, rng.randint(1, len(unfinished))), rng)
        between()


def test_penalties_change_what_is_said(expected: list[list[int]], folder: Path) -> None:
    """Without this, the other tests would say nothing."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    plain = [oracle(model, prompt, SamplingParams()) for prompt in PROMPTS]
    assert [own != other for own, other in zip(plain, expected, strict=True)] == [True] * 5 + [False]
    assert all(len(set(own)) < NEW_TOKENS for own in plain)


@pytest.mark.parametrize("with_slots", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_greedy_tokens_equal_the_oracle(
    build: Callable[[], SyncRouter], expected: list[list[int]], seed: int, with_slots: bool
) -> None:
    rng = random.Random(seed)
    live = sequences(Pool(rng), with_slots)
    run(build(), live, rng)
    assert [sequence.drawn for sequence in live] == expected


@pytest.mark.parametrize("seed", range(4))
def test_preemption_spill_and_compaction_change_nothing(
    build: Callable[[], SyncRouter], expected: list[list[int]], seed: int
) -> None:
    rng, router = random.Random(seed), build()
    pool = Pool(rng)
    live = sequences(pool)
    done: dict[str, int] = dict.fromkeys(["recomputed", "spilled", "moved"], 0)

    def leave(row: Row) -> None:
        router.apply(ReleaseSeq(row.request_id, row.slot, "preempted"))
        pool.free(row)
        row.blocks, row.slot = pool.table(row), pool.slot()

    def disturb() -> None:
        row = rng.choice(live).row
        what = rng.choice(["recomputed", "spilled", "moved", "", ""])
        if what == "recomputed":
            leave(row)
            row.start = row.end = 0
        elif what == "spilled" and row.start > 0:
            used = -(-row.start // BLOCK_SIZE)
            saved = SaveSequenceState(row.request_id, tuple(map(BlockId, row.blocks[:used])), row.start)
            assert isinstance(router.apply(saved), Saved)
            leave(row)
            router.apply(RestoreSequenceState(row.request_id, tuple(map(BlockId, row.blocks[:used])), row.start))
        elif what == "moved":
            target = pool.slot()
            router.apply(CompactSlot(row.request_id, row.slot, target))
            pool.slots.append(row.slot)
            row.slot = target
        if what:
            done[what] += 1

    run(router, live, rng, disturb)
    assert [sequence.drawn for sequence in live] == expected
    assert min(done.values()) > 3


def run_ahead(router: AsyncRouter, live: Sequence[Live], until: int) -> None:
    """Decode at depth 2 up to `until` new tokens, all together; each step is fed with what the host has not seen."""
    rows = tuple(sequence.row for sequence in live)
    for sequence in live:
        sequence.take(1)
    newest = router.launch(Decode(rows))
    for _ in range(until - len(live[0].drawn) - 1):
        fed = router.launch(DecodeFed(rows, tuple(Draw(sequence.params) for sequence in live)))
        settle(router, newest, live)
        newest = fed
    settle(router, newest, live)


def settle(router: AsyncRouter, ticket: Any, live: Sequence[Live]) -> None:
    for sequence, token in zip(live, router.await_result(ticket).tokens, strict=True):
        sequence.settle(token)


@pytest.mark.parametrize("with_slots", [True, False])
def test_steps_that_are_fed_on_the_device_equal_the_oracle(
    build: Callable[[], SyncRouter], expected: list[list[int]], with_slots: bool
) -> None:
    """Ahead, then drained and preempted, then ahead again."""
    router, rng = AsyncRouter(build()), random.Random(0)
    pool = Pool(rng)
    live = sequences(pool, with_slots)

    for sequence in live:
        sequence.take(len(sequence.row.known))
    settle(router, router.launch(Prefill(tuple(sequence.row for sequence in live))), live)
    run_ahead(router, live, 14)
    preempted = live[::2]
    for row in (sequence.row for sequence in preempted):
        if with_slots:
            router.apply(ReleaseSeq(row.request_id, row.slot, "preempted"))
            pool.slots.append(row.slot)
            row.slot = pool.slot()
        row.start = 0
    while missing := [sequence for sequence in preempted if sequence.pending > 1]:
        for sequence in missing:
            sequence.take(min(5, sequence.pending - 1))
        settle(router, router.launch(Prefill(tuple(sequence.row for sequence in missing))), missing)
    run_ahead(router, live, NEW_TOKENS)
    assert [sequence.drawn for sequence in live] == expected
