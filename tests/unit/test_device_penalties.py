"""Penalties against a plain definition, whatever happened to a row's slot before."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from device import penalties as module
from device.draws import Drawn
from device.penalties import Penalties
from scheduler.contract import DeviceError, Draw, Fault
from scheduler.effects import NO_SLOT
from scheduler.ids import RequestId
from scheduler.request import SamplingParams

VOCABULARY, POSITIONS, SLOTS = 40, 64, 5
STRONG = SamplingParams(repetition_penalty=1.7, presence_penalty=0.6, frequency_penalty=0.25)


def drawn(
    known: Sequence[int],
    prompt: int = 0,
    slot: int = NO_SLOT,
    params: SamplingParams = STRONG,
    name: str = "r",
    fed: bool = False,
) -> Drawn:
    return Drawn(RequestId(name), Draw(params), known, len(known), prompt, slot, fed)


def fresh(slots: int = SLOTS, positions: int = POSITIONS) -> Penalties:
    return Penalties(slots, VOCABULARY, positions, torch.device("cpu"))


def scores(rows: int, seed: int = 0) -> Tensor:
    given = torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3
    given[:, 7] = 0.0
    given[:, 8] = float("-inf")
    return given


def penalised(row: Tensor, known: Sequence[int], prompt: int, params: SamplingParams) -> Tensor:
    """The definition, one id after another (source: vLLM's SamplingParams and `apply_penalties`)."""
    values = row.numpy().copy()
    sampled = Counter(known[prompt:])
    for token in set(known):
        factor = np.float32(params.repetition_penalty)
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
        values[token] -= np.float32(params.frequency_penalty) * np.float32(sampled[token])
        values[token] -= np.float32(params.presence_penalty) * np.float32(sampled[token] > 0)
    return torch.from_numpy(values)


def apply(state: Penalties, given: Tensor, rows: Sequence[Drawn], fed: Sequence[int] | None = None) -> Tensor:
    changed = given.clone()
    state.apply(changed, rows, None if fed is None else torch.tensor(fed))
    return changed


def check(state: Penalties, rows: Sequence[Drawn], fed: Sequence[int] | None = None, seed: int = 0) -> None:
    given = scores(len(rows), seed)
    found = apply(state, given, rows, fed)
    for i, row in enumerate(rows):
        known = [*row.known[: row.end], *([fed[i]] if fed is not None and row.fed else [])]
        assert torch.equal(found[i], penalised(given[i], known, row.prompt_tokens, row.draw.params)), row


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        repetition_penalty=rng.choice([1.0, 1.3, 0.7, 100.0]),
        presence_penalty=rng.choice([0.0, 0.9, -2.0]),
        frequency_penalty=rng.choice([0.0, 0.3, -1.1]),
    )


def random_ids(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(VOCABULARY), k=count)


@pytest.mark.parametrize("seed", range(20))
def test_random_rows_equal_the_definition(seed: int) -> None:
    rng = random.Random(seed)
    slots = rng.sample(range(SLOTS), SLOTS)
    rows = []
    for i in range(8):
        known = random_ids(rng, rng.choice([1, 2, 9, 40, POSITIONS]))
        slot = slots.pop() if slots and rng.random() < 0.6 else NO_SLOT
        rows.append(drawn(known, rng.randint(0, len(known)), slot, random_params(rng), f"r{i}"))
    check(fresh(), rows, seed=seed)


def test_a_worked_example() -> None:
    """Prompt 0 1, sampled 1 2 2: repetition once per id of both, the others for what was sampled."""
    given = torch.full((1, VOCABULARY), 4.0)
    given[0, 2] = -4.0
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    found = apply(fresh(), given, [drawn([0, 1, 1, 2, 2], 2, 0, params)])
    assert found[0, :4].tolist() == [2.0, 2.0 - 0.25 - 0.5, -8.0 - 2 * 0.25 - 0.5, 4.0]


def test_rows_without_a_penalty_are_untouched_and_take_no_memory() -> None:
    state, given = fresh(), scores(3)
    plain = drawn([1, 2, 3], 1, 0, SamplingParams(temperature=0.5))
    assert torch.equal(apply(state, given, [plain] * 3), given)
    assert state._tables is None
    found = apply(state, given, [plain, drawn([1, 2], 1, 1), plain])
    assert torch.equal(found[[0, 2]], given[[0, 2]])
    assert not torch.equal(found[1], given[1])
    assert state._tables is not None


def test_nothing_is_not_a_number_where_an_extreme_penalty_meets_zero() -> None:
    for penalty in (0.01, 100.0):
        found = apply(fresh(), scores(1), [drawn([7, 8, 9], 0, 0, SamplingParams(repetition_penalty=penalty))])
        assert found[0, 7] == 0.0
        assert found[0, 8] == float("-inf")


class Spy:
    """How many known ids had to be counted, for each row of each call."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[list[int]] = []
        before = module._spread

        def spread(shares: Any, counts: Sequence[int]) -> Any:
            self.calls.append(list(counts))
            return before(shares, counts)

        patch.setattr(module, "_spread", spread)


def test_a_row_that_goes_on_counts_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    state, spy = fresh(), Spy(monkeypatch)
    known = [3, 4, 5]
    check(state, [drawn(known, 3, 2)])
    for token in (5, 5, 9):
        known.append(token)
        check(state, [drawn(known, 3, 2)])
    check(state, [drawn(known, 3, 2)])
    assert spy.calls == [[3], [1], [1], [1], [0]]


def test_a_slot_that_moves_keeps_its_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    state, spy = fresh(), Spy(monkeypatch)
    first, second = [1, 1, 2], [3, 4, 4]
    check(state, [drawn(first, 1, 0, name="a"), drawn(second, 1, 3, name="b")])
    state.zero(0)
    state.move(3, 0)
    second.append(3)
    check(state, [drawn(second, 1, 0, name="b")])
    check(state, [drawn([9, 9], 1, 3, name="c")])
    assert spy.calls == [[3, 3], [1], [2]]


def test_a_zeroed_slot_is_zeros() -> None:
    state = fresh()
    check(state, [drawn([1, 2, 2], 1, 4), drawn([3, 3], 0, 1, name="other")])
    state.zero(4)
    tables = state._tables
    assert tables is not None
    assert not tables.counts[4].any()
    assert not tables.history[4].any()
    assert tables.counts[1].sum() == 2
    for nobody in (NO_SLOT, 0, 4):
        state.zero(nobody)
    assert tables.counts[1].sum() == 2


def test_effects_on_a_device_without_penalties_do_nothing() -> None:
    state = fresh()
    state.zero(0)
    state.move(0, 1)
    assert state._tables is None


@pytest.mark.parametrize("is_told", [True, False])
def test_the_same_sequence_comes_back_to_its_slot(is_told: bool) -> None:
    """Preempted, then resumed with the very same list, after another one had the slot."""
    state, known = fresh(), [1, 2, 2]
    check(state, [drawn(known, 1, 0)])
    if is_told:
        state.zero(0)
    known.append(5)
    check(state, [drawn(known, 1, 0)])
    check(state, [drawn([7] * 9, 1, 0, name="other")])
    check(state, [drawn(known, 1, 0)])


def test_the_same_name_with_other_ids_is_counted_anew() -> None:
    state, known = fresh(), [5, 6, 6, 3]
    check(state, [drawn([1, 2, 2, 3], 1, 0)])
    check(state, [drawn(known, 1, 0)])
    check(state, [drawn(known, 4, 0)])


def test_a_sequence_that_was_cut_back_is_counted_anew() -> None:
    state, known = fresh(), [1, 2, 2, 3]
    check(state, [drawn(known, 1, 0)])
    known.pop()
    check(state, [drawn(known, 1, 0)])
    known.append(9)
    check(state, [drawn(known, 1, 0)])


def test_a_fed_id_counts_before_the_host_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Depth 2: each step is launched with the id that the step before it draws, which the host appends later."""
    state, spy = fresh(), Spy(monkeypatch)
    slotted, bare, idle = [1, 2, 3], [4, 4], [6, 6, 1]

    def step(tokens: list[int] | None) -> None:
        fed = tokens is not None
        first, second = drawn(slotted, 2, 3, name="a", fed=fed), drawn(bare, 1, name="b", fed=fed)
        check(state, [first, second, drawn(idle, 1, 0, name="c")], tokens)

    step(None)
    for token in (3, 3, 12, 1):
        step([token, token + 1, -5])
        slotted.append(token)
        bare.append(token + 1)
    step(None)
    with_slot, without = spy.calls[::2], spy.calls[1::2]
    assert with_slot == [[3, 3], *[[0, 0]] * 5]
    assert without == [[2], [2], [3], [4], [5], [6]]


def test_a_fed_step_that_is_not_kept_leaves_no_trace() -> None:
    state, known = fresh(), [1, 2, 3]
    check(state, [drawn(known, 1, 0)])
    check(state, [drawn(known, 1, 0, fed=True)], fed=[9])
    check(state, [drawn(known, 1, 0)])  # launched anew, not fed
    check(state, [drawn(known, 1, 0, fed=True)], fed=[9])
    check(state, [drawn(known, 1, 0, fed=True)], fed=[11])


def test_an_id_that_could_not_be_drawn_is_fed_without_harm() -> None:
    state, known = fresh(), [1, 2]
    apply(state, scores(1), [drawn(known, 1, 0, fed=True)], fed=[-1])
    state.zero(0)
    check(state, [drawn(known, 1, 0)])


def test_a_fed_row_needs_fed_ids() -> None:
    with pytest.raises(ValueError, match="r is fed, and no fed ids are given"):
        apply(fresh(), scores(1), [drawn([1], 0, 0, fed=True)])


@pytest.mark.parametrize("slot", [0, NO_SLOT])
@pytest.mark.parametrize("wrong", [-1, VOCABULARY])
def test_a_history_outside_the_vocabulary_is_refused_and_forgotten(slot: int, wrong: int) -> None:
    state, known = fresh(), [1, 2, 2]
    check(state, [drawn(known, 1, slot)])
    known.append(wrong)
    with pytest.raises(DeviceError, match=f"r: history token id {wrong} is outside 0 to {VOCABULARY - 1}") as caught:
        apply(state, scores(1), [drawn(known, 1, slot)])
    assert caught.value.fault is Fault.READBACK
    known[-1] = 5
    check(state, [drawn(known, 1, slot)])


def test_a_failure_midway_is_counted_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    state, known = fresh(), [1, 2, 2]
    check(state, [drawn(known, 1, 0)])
    known.append(2)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(module._Tables, "_penalise", fail)
        with pytest.raises(RuntimeError):
            apply(state, scores(1), [drawn(known, 1, 0)])
    check(state, [drawn(known, 1, 0)])


@pytest.mark.parametrize(("positions", "dtype"), [(32767, torch.int16), (32768, torch.int32)])
def test_counts_cannot_overflow(positions: int, dtype: torch.dtype) -> None:
    state = fresh(1, positions)
    params = SamplingParams(frequency_penalty=0.125)
    given = scores(1)
    found = apply(state, given, [drawn([3] * positions, 0, 0, params)])
    assert found[0, 3] == given[0, 3] - 0.125 * positions
    assert state._tables is not None
    assert state._tables.counts.dtype == dtype


class Life:
    """Live sequences on a device: they run, are fed, leave, come back elsewhere, move and end."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.state = fresh()
        self.known: dict[str, list[int]] = {}
        self.prompts: dict[str, int] = {}
        self.params: dict[str, SamplingParams] = {}
        self.slots: dict[str, int] = {}
        self.steps = self.fed = self.born = 0

    @property
    def free(self) -> list[int]:
        return sorted(set(range(SLOTS)) - set(self.slots.values()))

    def submit(self) -> None:
        name = f"r{self.rng.randrange(6)}"  # names come back
        if name in self.known:
            return
        prompt = random_ids(self.rng, self.rng.randint(1, 12))
        self.known[name], self.prompts[name], self.params[name] = prompt, len(prompt), random_params(self.rng)
        self.born += 1

    def place(self) -> None:
        homeless = [name for name in self.known if name not in self.slots]
        if homeless and self.free:
            self.slots[self.rng.choice(homeless)] = self.rng.choice(self.free)

    def leave(self) -> None:
        """Preempted; the device may or may not be told at once."""
        if self.slots:
            slot = self.slots.pop(self.rng.choice(sorted(self.slots)))
            if self.rng.random() < 0.7:
                self.state.zero(slot)

    def end(self) -> None:
        if self.known:
            name = self.rng.choice(sorted(self.known))
            del self.known[name]
            slot = self.slots.pop(name, None)
            if slot is not None and self.rng.random() < 0.7:
                self.state.zero(slot)

    def compact(self) -> None:
        if self.slots and self.free:
            name, target = self.rng.choice(sorted(self.slots)), self.rng.choice(self.free)
            if self.rng.random() < 0.7:
                self.state.move(self.slots[name], target)
            self.slots[name] = target

    def rewind(self) -> None:
        name = self.rng.choice(sorted(self.known)) if self.known else None
        if name is not None and len(self.known[name]) > self.prompts[name]:
            del self.known[name][self.rng.randint(self.prompts[name], len(self.known[name]) - 1) :]

    def run(self) -> None:
        """A few steps of one batch, ahead of the host from the second on."""
        names = [name for name in sorted(self.known) if self.rng.random() < 0.7]
        names = [name for name in names if len(self.known[name]) + 4 <= POSITIONS]
        if not names:
            return
        self.step(names, None)
        pending = random_ids(self.rng, len(names))
        for _ in range(self.rng.randrange(3)):
            self.step(names, pending)
            self.settle(names, pending)
            pending = random_ids(self.rng, len(names))
        if self.rng.random() < 0.8:
            self.settle(names, pending)

    def step(self, names: list[str], fed: list[int] | None) -> None:
        rows = [
            drawn(
                self.known[name], self.prompts[name], self.slots.get(name, NO_SLOT), self.params[name], name, bool(fed)
            )
            for name in names
        ]
        check(self.state, rows, fed, seed=self.steps)
        self.steps += 1
        self.fed += fed is not None

    def settle(self, names: list[str], tokens: list[int]) -> None:
        for name, token in zip(names, tokens, strict=True):
            self.known[name].append(token)


@pytest.mark.parametrize("seed", range(15))
def test_counts_are_right_whatever_came_before(seed: int) -> None:
    life = Life(seed)
    for _ in range(400):
        act = life.rng.choice(
            [life.submit, life.place, life.place, life.run, life.run, life.leave, life.end, life.compact, life.rewind]
        )
        act()
    assert life.steps > 50
    assert life.fed > 5
    assert life.born > 5
