"""What was reserved for fed steps: taken back exactly, and never twice."""

import pytest
from rows import make_row

from device.reservations import Reservations
from scheduler.contract import DecodeFed, DeviceError, Draw, Fault
from scheduler.effects import ReserveKv
from scheduler.ids import BlockId, RequestId
from scheduler.request import SamplingParams

A, B = RequestId("a"), RequestId("b")


def blocks(*ids: int) -> tuple[BlockId, ...]:
    return tuple(BlockId(i) for i in ids)


def fed(**tables: list[int]) -> DecodeFed:
    rows = tuple(make_row(name, [1], 0, table) for name, table in tables.items())
    return DecodeFed(rows, tuple(Draw(SamplingParams()) for _ in rows))


def test_the_newest_fed_step_is_rolled_back_once() -> None:
    ledger = Reservations()
    for block in (3, 5):
        ledger.reserve(ReserveKv(A, blocks(block)))
        ledger.take(fed(a=[3, 5]))
    assert ledger.roll_back(A) == blocks(5)
    with pytest.raises(DeviceError, match="a: no fed step of it") as caught:
        ledger.roll_back(A)
    assert caught.value.fault is Fault.EFFECT


def test_a_fed_step_that_needed_no_block_hides_an_older_reservation() -> None:
    ledger = Reservations()
    ledger.reserve(ReserveKv(A, blocks(3)))
    ledger.take(fed(a=[3], b=[4]))
    ledger.take(fed(a=[3], b=[4]))
    assert ledger.roll_back(A) == ledger.roll_back(B) == ()


def test_what_a_failed_launch_did_not_take_is_still_there() -> None:
    ledger = Reservations()
    ledger.take(fed(a=[3]))
    ledger.reserve(ReserveKv(A, blocks(5)))
    assert ledger.roll_back(A) == blocks(5)
    assert ledger.roll_back(A) == ()


def test_a_step_that_is_not_fed_ends_it_all() -> None:
    ledger = Reservations()
    ledger.reserve(ReserveKv(A, blocks(5)))
    ledger.take(fed(a=[5]))
    ledger.reserve(ReserveKv(B, blocks(6)))
    ledger.clear()
    for request_id in (A, B):
        with pytest.raises(DeviceError):
            ledger.roll_back(request_id)


def test_blocks_are_reserved_once_for_a_step() -> None:
    ledger = Reservations()
    assert ledger.reserve(ReserveKv(A, blocks(5))) == blocks(5)
    with pytest.raises(DeviceError, match="reserved for its next fed step already") as caught:
        ledger.reserve(ReserveKv(A, blocks(6)))
    assert caught.value.fault is Fault.EFFECT


@pytest.mark.parametrize(
    ("plan", "message"),
    [(fed(b=[5]), "a: blocks are reserved for it, but it has no row"), (fed(a=[5, 6]), "not the last ones")],
)
def test_a_fed_step_that_is_not_the_one_reserved_for(plan: DecodeFed, message: str) -> None:
    ledger = Reservations()
    ledger.reserve(ReserveKv(A, blocks(5)))
    with pytest.raises(DeviceError, match=message) as caught:
        ledger.check(plan)
    assert caught.value.fault is Fault.FORWARD
    assert ledger.roll_back(A) == blocks(5)


def test_the_last_blocks_of_its_table_are_its_own() -> None:
    ledger = Reservations()
    ledger.reserve(ReserveKv(A, blocks(5, 6)))
    ledger.check(fed(a=[1, 5, 6], b=[9]))
