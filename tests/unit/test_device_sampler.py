import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from device import sampler
from device.draws import Drawn
from device.penalties import Penalties
from device.sampler import NO_TOKEN, draw_ids, uniform
from scheduler.contract import Draw
from scheduler.ids import RequestId
from scheduler.request import SamplingParams

VOCABULARY = 300


def draw(position: int = 1, suppress: frozenset[int] = frozenset(), history: Any = None, **params: Any) -> Drawn:
    """history: the ids before the drawn one; if there are none that matter, `position` says how many."""
    known = range(position) if history is None else history
    return Drawn(RequestId("r"), Draw(SamplingParams(**params), suppress), known, len(known))


def draw_tokens(given: Tensor, drawn: Sequence[Drawn]) -> list[int]:
    penalties = Penalties(0, given.shape[-1], 64, given.device)
    ids: list[int] = draw_ids(given, drawn, penalties).tolist()
    return ids


def logits(rows: int, seed: int = 0, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def kept_by_filters(row: Tensor, top_k: int, top_p: float) -> set[int]:
    """The plain definition: sort, take k, then take until the mass of what is left reaches p."""
    probs = row.double().softmax(0).tolist()
    order = sorted(range(len(probs)), key=lambda i: -probs[i])[: top_k or len(probs)]
    total, mass, kept = sum(probs[i] for i in order), 0.0, set()
    for token in order:
        if mass >= top_p * total:
            break
        kept.add(token)
        mass += probs[token]
    return kept


def test_greedy_takes_the_first_of_the_largest() -> None:
    given = torch.tensor([[0.0, 2.0, 2.0, 1.0], [5.0, 1.0, 5.0, 5.0]], dtype=torch.bfloat16)
    assert draw_tokens(given, [draw(), draw()]) == [1, 0]


def test_no_rows() -> None:
    assert draw_tokens(torch.empty(0, 4), []) == []


def test_uniform_numbers_never_change() -> None:
    """They are part of the protocol: another node, or a later version, must draw the same tokens."""
    assert [uniform(0, 0), uniform(0, 1), uniform(1, 0)] == [
        0.011546754286331562,
        0.5023796042735054,
        0.3035680343067586,
    ]
    assert uniform(-1, 7) == uniform((1 << 64) - 1, 7)
    assert len({uniform(seed, position) for seed in range(50) for position in range(50)}) == 2500


def test_uniform_numbers_are_uniform() -> None:
    numbers = np.sort([uniform(3, position) for position in range(4000)])
    assert abs(numbers - (np.arange(4000) + 0.5) / 4000).max() < 0.03


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head", [16, 1024])
def test_a_token_does_not_depend_on_the_company(dtype: torch.dtype, head: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "HEAD", head)
    rng = random.Random(0)
    draws = [
        draw(
            suppress=frozenset(rng.sample(range(VOCABULARY), rng.choice([0, 0, 5]))),
            history=rng.choices(range(VOCABULARY), k=rng.choice([1, 20, 100])),
            temperature=rng.choice([0.0, 0.3, 1.0, 2.0]),
            top_k=rng.choice([0, 1, 5, 40, 299, 300, 5000]),
            top_p=rng.choice([1.0, 0.95, 0.5, 0.01]),
            seed=rng.randrange(1 << 40),
            repetition_penalty=rng.choice([1.0, 1.3]),
            presence_penalty=rng.choice([0.0, 0.0, 1.1]),
            frequency_penalty=rng.choice([0.0, 0.0, -0.4]),
        )
        for _ in range(60)
    ]
    given = logits(60).to(dtype)
    alone = [draw_tokens(given[i : i + 1], [draws[i]])[0] for i in range(60)]
    assert draw_tokens(given, draws) == alone
    order = rng.sample(range(60), 60)
    assert draw_tokens(given[order], [draws[i] for i in order]) == [alone[i] for i in order]


@pytest.mark.parametrize("head", [16, 1024])
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(5, 1.0), (0, 0.8), (0, 0.999), (30, 0.9), (100, 0.99), (1, 0.5), (0, 1e-6), (299, 1.0)]
)
def test_only_what_the_filters_keep_is_drawn_and_all_of_it(
    head: int, top_k: int, top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "HEAD", head)
    row = logits(1, seed=top_k)[0]
    probs = row.double().softmax(0).unsqueeze(0)
    cut = sampler._cutoffs(probs, [SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p)])
    assert set((probs >= cut)[0].nonzero()[:, 0].tolist()) == kept_by_filters(row, top_k, top_p)


def test_tokens_are_drawn_as_often_as_they_should_be() -> None:
    row = torch.tensor([[2.0, 1.0, 0.0, -1.0, 1.5, 0.5]])
    n, temperature = 6000, 0.7
    tokens = draw_tokens(row.expand(n, -1), [draw(position=i + 1, temperature=temperature, seed=9) for i in range(n)])
    wanted = (row[0] / temperature).softmax(0)
    counts = Counter(tokens)
    chi_square = sum((counts[i] - n * p) ** 2 / (n * p) for i, p in enumerate(wanted.tolist()))
    assert chi_square < 20.5  # 0.1 % point of 5 degrees of freedom; the draws are fixed by the seed


def test_the_position_that_is_drawn_is_the_end_of_the_row() -> None:
    even = torch.zeros(40, 2)
    tokens = draw_tokens(even, [draw(position=i + 1, temperature=1.0, seed=5) for i in range(40)])
    assert tokens == [int(uniform(5, i + 1) >= 0.5) for i in range(40)]
    assert set(tokens) == {0, 1}


@pytest.mark.parametrize(("number", "token"), [(0.0, 1), (0.49, 1), (0.5, 3), (1.0 - 2**-53, 3)])
def test_a_token_of_no_weight_is_not_drawn_at_the_edges(number: float, token: int) -> None:
    weights = torch.tensor([[0.0, 0.1, 0.0, 0.1, 0.0]], dtype=torch.float64)
    assert sampler._invert(weights, torch.tensor([[number]], dtype=torch.float64)).tolist() == [token]


def test_suppressed_tokens_are_never_drawn() -> None:
    given = torch.tensor([[9.0, 5.0, 1.0]])
    assert draw_tokens(given, [draw(suppress=frozenset({0}))]) == [1]
    draws = [draw(position=i + 1, suppress=frozenset({0, 1}), temperature=1.0) for i in range(50)]
    assert set(draw_tokens(given.expand(50, -1), draws)) == {2}


def test_the_repetition_penalty_lowers_positive_and_negative_logits_once() -> None:
    given = torch.tensor([[4.0, 3.0, -9.0], [-1.0, -1.5, -9.0]])
    history = (0, 0, 2)
    mild, strong = (draw(history=history, repetition_penalty=penalty) for penalty in (1.3, 1.6))
    assert draw_tokens(given, [mild, mild]) == [0, 0]
    assert draw_tokens(given, [strong, strong]) == [1, 1]
    assert draw_tokens(given, [draw(history=history), draw(history=history)]) == [0, 0]


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.8, "seed": 4}, {"temperature": 2.0, "top_p": 0.7, "top_k": 9}]
)
def test_penalties_come_before_the_draw(params: dict[str, Any]) -> None:
    """A penalised draw is the plain draw from penalised logits; what is suppressed stays so."""
    penalty = {"repetition_penalty": 1.4, "presence_penalty": 0.7, "frequency_penalty": 0.5}
    given = logits(30)
    history = [list(range(i, 3 * i + 1)) * 2 for i in range(30)]
    penalised = [draw(history=own, suppress=frozenset({5}), **params, **penalty) for own in history]
    lowered = given.clone()
    for row, own in zip(lowered, history, strict=True):
        seen = torch.tensor(own).unique()
        row[seen] = torch.where(row[seen] > 0, row[seen] / 1.4, row[seen] * 1.4) - 0.5 * 2 - 0.7
    lowered[:, 5] = float("-inf")
    tokens = draw_tokens(given, penalised)
    assert tokens == draw_tokens(lowered, [draw(history=own, **params) for own in history])
    assert tokens != draw_tokens(given, [draw(history=own, **params) for own in history])


@pytest.mark.parametrize("params", [{"repetition_penalty": 1.5}, {"temperature": 1.0, "frequency_penalty": 0.8}])
def test_a_fed_draw_is_the_draw_of_one_position_later(params: dict[str, Any]) -> None:
    """Beside rows without a penalty, which need no fed id."""
    given = logits(20)
    fed = [int(row.argmax()) if i % 2 else 7 for i, row in enumerate(given)]
    history = [[1, 2, 3 + i] for i in range(20)]
    how = [params if i % 3 else {} for i in range(20)]
    ahead = [draw(history=own, seed=i, **how[i])._replace(fed=True) for i, own in enumerate(history)]
    after = [draw(history=[*own, fed[i]], seed=i, **how[i]) for i, own in enumerate(history)]
    found = draw_ids(given, ahead, Penalties(0, VOCABULARY, 64, given.device), torch.tensor(fed))
    assert found.tolist() == draw_tokens(given, after)


def test_the_given_logits_are_not_modified() -> None:
    given = logits(2)
    before = given.clone()
    draw_tokens(given, [draw(suppress=frozenset({1}), temperature=1.0, top_k=3), draw(suppress=frozenset({2}))])
    assert torch.equal(given, before)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.5, "top_k": 4},
        {"repetition_penalty": 1.2},
        {"temperature": 1.0, "frequency_penalty": 1.0, "presence_penalty": -1.0},
    ],
)
def test_a_row_without_a_finite_answer_is_named(params: dict[str, Any]) -> None:
    given = logits(3)
    given[1, 5] = float("nan")
    tokens = draw_tokens(given, [draw(**params)] * 3)
    assert [token == NO_TOKEN for token in tokens] == [False, True, False]
    given[1] = float("-inf")
    assert draw_tokens(given, [draw(**params)] * 3) == tokens


def test_greedy_rows_do_not_reach_the_sampling_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a greedy row was sampled")

    monkeypatch.setattr(sampler, "_redraw", refuse)
    assert len(draw_tokens(logits(4), [draw()] * 4)) == 4
