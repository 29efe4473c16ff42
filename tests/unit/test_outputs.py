"""Outputs by columns: they look like a sequence of rows and weigh nothing."""

from pickle import dumps, loads

import pytest

from scheduler.events import BlocksStored, BoundaryEffects, Output, Outputs, SourceHeld
from scheduler.ids import HandoffId, RequestId
from scheduler.request import FinishReason

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")
ROWS = [
    Output(A, 0, 11, cached_tokens=0),
    Output(B, 3, 12, FinishReason.STOP),
    Output(C, 5, None, FinishReason.ERROR),
    Output(B, 0, 0, FinishReason.LENGTH, cached_tokens=8),
]


def test_of_keeps_every_field_of_every_row() -> None:
    outputs = Outputs.of(ROWS)
    assert list(outputs) == ROWS
    assert outputs.request_ids == [A, B, C, B]
    assert outputs.indices == [0, 3, 5, 0]
    assert outputs.tokens == [11, 12, None, 0]
    assert outputs.finishes == {1: FinishReason.STOP, 2: FinishReason.ERROR, 3: FinishReason.LENGTH}
    assert outputs.cached == {0: 0, 3: 8}


def test_add_appends() -> None:
    outputs = Outputs()
    assert (len(outputs), list(outputs)) == (0, [])
    for count, row in enumerate(ROWS, 1):
        outputs.add(row)
        assert len(outputs) == count
        assert outputs[-1] == row


def test_rows_are_found_by_index_from_both_ends() -> None:
    outputs = Outputs.of(ROWS)
    assert [outputs[i] for i in range(4)] == ROWS
    assert [outputs[i] for i in (-4, -3, -2, -1)] == ROWS
    for beyond in (4, -5):
        with pytest.raises(IndexError):
            outputs[beyond]


@pytest.mark.parametrize("part", [slice(1, 3), slice(None), slice(2, None), slice(None, None, -1), slice(9, 12)])
def test_a_slice_is_made_of_the_same_rows(part: slice) -> None:
    sliced = Outputs.of(ROWS)[part]
    assert isinstance(sliced, Outputs)
    assert list(sliced) == ROWS[part]


def test_without_moves_what_belongs_to_the_rows() -> None:
    outputs = Outputs.of(ROWS)
    rest = outputs.without([2, 0])
    assert list(rest) == [ROWS[1], ROWS[3]]
    assert rest.finishes == {0: FinishReason.STOP, 1: FinishReason.LENGTH}
    assert rest.cached == {1: 8}
    assert list(outputs) == ROWS
    assert list(outputs.without([])) == ROWS
    assert list(outputs.without(range(4))) == []


def test_it_equals_any_sequence_of_equal_rows() -> None:
    outputs = Outputs.of(ROWS)
    assert outputs == Outputs.of(ROWS)
    assert outputs == ROWS
    assert outputs == tuple(ROWS)
    assert outputs != ROWS[:3]
    assert outputs != Outputs.of(reversed(ROWS))
    assert outputs != "abcd"
    assert Outputs() == ()


@pytest.mark.parametrize("row", range(4))
def test_one_other_field_makes_it_unequal(row: int) -> None:
    changed = [*ROWS]
    changed[row] = Output(changed[row].request_id, changed[row].index, 99, changed[row].finish)
    assert Outputs.of(ROWS) != Outputs.of(changed)


def test_it_is_a_sequence_in_all_ways() -> None:
    outputs = Outputs.of(ROWS)
    assert ROWS[2] in outputs
    assert Output(A, 1, 11) not in outputs
    assert outputs.index(ROWS[3]) == 3
    assert list(reversed(outputs)) == ROWS[::-1]
    assert outputs.count(ROWS[0]) == 1


def test_it_survives_pickling_as_part_of_a_boundary() -> None:
    effects = BoundaryEffects(
        kv_events=(BlocksStored(1, None, (b"x" * 16,)),),
        outputs=Outputs.of(ROWS),
        events=(SourceHeld(HandoffId("h"), 1, A, 5, 0),),
        retired=(B,),
        incarnation=7,
    )
    again = loads(dumps(effects))
    assert again == effects
    assert isinstance(again.outputs, Outputs)
    assert again.outputs[1].finish is FinishReason.STOP


def test_a_boundary_is_empty_only_if_it_says_nothing() -> None:
    assert BoundaryEffects().is_empty
    assert BoundaryEffects(outputs=Outputs()).is_empty
    told = [
        BoundaryEffects(kv_events=(BlocksStored(1, None, ()),)),
        BoundaryEffects(outputs=Outputs.of(ROWS[:1])),
        BoundaryEffects(events=(SourceHeld(HandoffId("h"), 1, A, 5, 0),)),
        BoundaryEffects(retired=(A,)),
    ]
    assert not any(effects.is_empty for effects in told)
