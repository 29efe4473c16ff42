"""The oracle device at depth 2: it feeds what was drawn, and notices when running ahead is misused."""

from typing import Any

import pytest
from kv_machine import KvMachine, expected_output
from rows import make_row

from scheduler.contract import Decode, DecodeFed, DeviceError, Draw, Fault, Prefill, Row
from scheduler.effects import CopyBlocks, Quiesce, Reserved, ReserveKv, Rollback
from scheduler.ids import BlockId, RequestId
from scheduler.request import SamplingParams

PROMPT = [4, 8, 15, 16]
A = RequestId("a")
GREEDY = Draw(SamplingParams())


def machine(**options: Any) -> KvMachine:
    device = KvMachine(8, 4, depth=2, **options)
    device.await_result(device.launch(Prefill((make_row("a", PROMPT[:3], 0, [3]),))))
    return device


def running(blocks: list[int]) -> Row:
    return make_row("a", PROMPT[3:], 3, blocks, GREEDY, PROMPT[:3])


def fed(*rows: Row) -> DecodeFed:
    return DecodeFed(rows, (GREEDY,) * len(rows))


@pytest.mark.parametrize("newest_first", [False, True])
def test_a_fed_step_computes_what_the_one_in_flight_drew(newest_first: bool) -> None:
    device = machine(newest_first=newest_first)
    row = running([3, 6])
    tickets = [device.launch(Decode((row,))), device.launch(fed(row))]
    assert [device.await_result(ticket).tokens[0] for ticket in tickets] == expected_output(PROMPT, 2)


def test_reservations_are_rolled_back_once() -> None:
    device = machine()
    row = running([3, 6])
    first = device.launch(Decode((row,)))
    assert device.apply(ReserveKv(A, (BlockId(6),))) == Reserved((BlockId(6),))
    second = device.launch(fed(row))
    for ticket in (first, second):
        device.await_result(ticket)
    assert device.apply(Rollback(A)) == Reserved((BlockId(6),))
    with pytest.raises(AssertionError, match="no fed step of it"):
        device.apply(Rollback(A))


def test_chosen_results_are_lost() -> None:
    device = machine(fail_awaits={1})
    row = running([3, 6])
    tickets = [device.launch(Decode((row,))), device.launch(fed(row))]
    with pytest.raises(DeviceError, match="step 1 was told to be lost") as caught:
        device.await_result(tickets[0])
    assert caught.value.fault is Fault.READBACK
    assert device.await_result(tickets[1]).tokens == tuple(expected_output(PROMPT, 2)[1:])


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda d, row: (d.await_result(d.launch(Decode((row,)))), d.launch(fed(row))), "without a step in flight"),
        (lambda d, row: (d.launch(Decode((row,))), d.launch(Decode((row,)))), "before the last was settled"),
        (lambda d, row: (d.launch(Decode((row,))), d.launch(fed(row)), d.launch(fed(row))), "before the last was"),
        (lambda d, row: (d.launch(Decode((row,))), d.apply(CopyBlocks(((BlockId(0), BlockId(1)),)))), "in flight"),
        (lambda d, row: (d.launch(Decode((row,))), d.apply(Quiesce()), d.launch(fed(running([3])))), "too short"),
        (
            lambda d, row: (d.launch(Decode((row,))), d.apply(ReserveKv(A, (BlockId(3),))), d.launch(fed(row))),
            "reserved elsewhere",
        ),
        (
            lambda d, row: (
                d.launch(Decode((row,))),
                d.apply(ReserveKv(RequestId("b"), (BlockId(5),))),
                d.launch(fed(row)),
            ),
            "not in the fed step",
        ),
    ],
)
def test_misuse_is_noticed(act: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        act(machine(), running([3, 6]))


def test_a_row_that_keeps_another_token_than_it_was_fed_is_noticed() -> None:
    device = machine()
    row = running([3, 6])
    first, second = device.launch(Decode((row,))), device.launch(fed(row))
    (token,) = device.await_result(first).tokens
    assert token is not None
    row.known.append(token + 1)  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match="did not keep"):
        device.await_result(second)


def test_blocks_that_change_hands_in_flight_are_noticed() -> None:
    device = machine()
    row = running([3, 6])
    first, second = device.launch(Decode((row,))), device.launch(fed(row))
    device.await_result(first)
    row.blocks = [3]
    with pytest.raises(AssertionError, match="table was changed"):
        device.await_result(second)
