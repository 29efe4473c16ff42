from dataclasses import replace
from typing import Any

import pytest
from rows import TINY_FACTS, make_row

from device.plan_check import check_plan
from scheduler.contract import Decode, DeviceError, Draw, Fault, Prefill, Row
from scheduler.request import SamplingParams

FACTS = TINY_FACTS


def row(tokens: Any, start: int, blocks: Any, draw: Draw | None = None, name: str = "a") -> Row:
    return make_row(name, tokens, start, blocks, draw)


def longer(row: Row) -> Row:
    return replace(row, known=[*row.known, 1])


DRAW = Draw(SamplingParams())
GOOD = row([1, 2, 3], 2, (7, 3), DRAW)


@pytest.mark.parametrize(
    "plan",
    [
        Prefill((GOOD,)),
        Prefill((GOOD, row([4], 3, (5,), DRAW, "b"), row([4], 0, (6,), None, "c"))),
        Decode((row([49], 29, tuple(range(8)), DRAW),)),
        # A shared prefix: both read block 0, each writes a block of its own.
        Decode((row([1], 4, (0, 1), DRAW), row([1], 4, (0, 2), DRAW, "b"))),
        # A table that is longer than needed is not looked at beyond the need.
        Decode((row([1], 0, (0, 99), DRAW),)),
        # A chunk that is not the last.
        Prefill((longer(row([1, 2], 0, (0,))),)),
    ],
)
def test_good_plans_pass(plan: Prefill | Decode) -> None:
    check_plan(plan, FACTS)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Prefill(()), "no rows"),
        (Decode((GOOD,)), "a decode row has one token, this one has 3"),
        (Prefill((row([], 0, (1,)),)), "no tokens"),
        (Prefill((row([1], -1, (1,)),)), "leave 0 to 29"),
        (Prefill((row([1, 1], 29, range(8)),)), "positions 29 to 30 leave 0 to 29"),
        (Prefill((row([1, 2, 3], 2, (7,)),)), "5 positions need 2 blocks, the table has 1"),
        (Prefill((row([1, 2, 3], 2, (7, 10)),)), "block id 10 is outside 0 to 9"),
        (Prefill((row([1, 2, 3], 2, (-1, 2)),)), "block id -1"),
        (Prefill((row([1, 50, 3], 2, (7, 3)),)), "token id 50 is outside 0 to 49"),
        (Prefill((row([1, -2, 3], 2, (7, 3)),)), "token id -2"),
        (Prefill((GOOD, row([1], 4, (2, 3), None, "b"))), "b and a would both write block 3"),
        (Prefill((longer(row([1, 2], 0, (1,), DRAW)),)), "token at position 2 is drawn, but it is known"),
        (Prefill((replace(GOOD, end=6),)), "ends at position 6, 5 tokens are known"),
        (Prefill((replace(GOOD, end=1),)), "no tokens"),
        (Prefill((row([1], 0, (1,), replace(DRAW, suppress=frozenset({50}))),)), "suppressed token id 50"),
    ],
)
def test_bad_plans_are_refused_with_what_is_wrong(plan: Prefill | Decode, message: str) -> None:
    with pytest.raises(DeviceError, match=message) as caught:
        check_plan(plan, FACTS)
    assert caught.value.fault is Fault.FORWARD


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=-0.1),
        SamplingParams(top_p=0.0),
        SamplingParams(top_p=1.1),
        SamplingParams(top_k=-1),
        SamplingParams(repetition_penalty=0.0),
        SamplingParams(repetition_penalty=-1.0),
        SamplingParams(repetition_penalty=0.009),
        SamplingParams(repetition_penalty=101.0),
        SamplingParams(repetition_penalty=float("inf")),
        SamplingParams(repetition_penalty=float("nan")),
        SamplingParams(presence_penalty=2.1),
        SamplingParams(presence_penalty=-2.1),
        SamplingParams(presence_penalty=float("nan")),
        SamplingParams(frequency_penalty=2.1),
        SamplingParams(frequency_penalty=float("-inf")),
        SamplingParams(temperature=float("nan")),
        SamplingParams(temperature=float("inf")),
    ],
)
def test_sampling_out_of_range_is_refused(params: SamplingParams) -> None:
    with pytest.raises(DeviceError, match="out of range"):
        check_plan(Prefill((replace(GOOD, draw=Draw(params)),)), FACTS)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(repetition_penalty=0.01, presence_penalty=2.0, frequency_penalty=-2.0),
        SamplingParams(repetition_penalty=100.0, presence_penalty=-2.0, frequency_penalty=2.0),
    ],
)
def test_penalties_at_the_edge_pass(params: SamplingParams) -> None:
    check_plan(Prefill((replace(GOOD, draw=Draw(params)),)), FACTS)


def test_a_slot_has_one_row() -> None:
    first, second = (row([1], 0, (block,), DRAW, name) for block, name in ((0, "a"), (1, "b")))
    facts = replace(FACTS, slots=2)
    check_plan(Prefill((first, second)), facts)
    check_plan(Prefill((replace(first, slot=1), replace(second, slot=0))), facts)
    check_plan(Prefill((replace(first, slot=1), second)), facts)
    with pytest.raises(DeviceError, match="b and a have the same slot 1"):
        check_plan(Prefill((replace(first, slot=1), replace(second, slot=1))), facts)
    for slot in (2, -2):
        with pytest.raises(DeviceError, match=f"a: slot {slot} is outside 0 to 1"):
            check_plan(Prefill((replace(first, slot=slot),)), facts)


def test_recurrent_state_needs_a_slot() -> None:
    with pytest.raises(DeviceError, match="slot -1 is outside 0 to 1, and the model needs one"):
        check_plan(Prefill((GOOD,)), replace(FACTS, slots=2, slot_bytes=64))
