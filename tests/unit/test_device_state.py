"""Slot-addressed state: records of a model's tensors, moved, copied, saved and guarded by the count they carry."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from device.kv_pool import Bytes, KvGeometry, KvPool
from device.state import UNKNOWN, SlotLayout, SlotState, SlotTensor
from scheduler.contract import DeviceError, Fault

TENSORS = (
    SlotTensor("a", (3, 5), torch.float32),
    SlotTensor("b", (7,), torch.bfloat16),
    SlotTensor("c", (), torch.int64),
)
LAYOUT = SlotLayout(TENSORS)
SLOTS, SNAPSHOTS = 4, 2


@pytest.fixture
def pool() -> KvPool:
    return KvPool(KvGeometry(1, 1, 3, 5, torch.float32), 3, torch.device("cpu"), SLOTS, LAYOUT.slot_bytes)


@pytest.fixture
def state(pool: KvPool) -> SlotState:
    return SlotState(LAYOUT, pool.slot_memory, SNAPSHOTS)


def fill(state: SlotState, slot: int, value: int, count: int) -> None:
    """What a step does: every tensor of the slot holds `value` after `count` tokens."""
    state.begin_step([slot], [])
    for tensor in TENSORS:
        state.tensor(tensor.name)[slot] = value
    state.end_step([slot], [count])


def content(state: SlotState, slot: int) -> tuple[int, ...]:
    """The one value of each tensor, and the count."""
    values = [set(state.tensor(tensor.name)[slot].flatten().tolist()) for tensor in TENSORS]
    assert all(len(own) == 1 for own in values)
    return (*(int(own.pop()) for own in values), state.count(slot))


class Noted:
    """A follower that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, ...]] = []

    def zero(self, slot: int) -> None:
        self.told.append((slot,))

    def move(self, slot: int, target: int) -> None:
        self.told.append((slot, target))


def refused(action: Callable[[], Any]) -> str:
    with pytest.raises(DeviceError) as caught:
        action()
    assert caught.value.fault is Fault.EFFECT
    return str(caught.value)


def record(state: SlotState, slot: int) -> Bytes:
    into: Bytes = np.empty(LAYOUT.slot_bytes, np.uint8)
    state.read(slot, into)
    return into


def test_a_record_is_one_aligned_piece_with_all_tensors(pool: KvPool, state: SlotState) -> None:
    assert LAYOUT.slot_bytes == 4 * 64  # the count, and 60, 14 and 8 bytes
    assert [offset for _, offset in LAYOUT.offsets] == [64, 128, 192]
    memory, start = pool.bytes_view(), pool.slot_offset(2)
    fill(state, 2, 5, 17)
    assert np.flatnonzero(memory).min() >= start
    assert np.flatnonzero(memory).max() < start + LAYOUT.slot_bytes
    assert memory[start : start + 8].view(np.int64)[0] == 17
    for tensor, offset in LAYOUT.offsets:
        view = state.tensor(tensor.name)
        assert view.shape == (SLOTS, *tensor.shape)
        assert (view[2].data_ptr() - pool.tensor.data_ptr(), view.dtype) == (start + offset, tensor.dtype)
    assert record(state, 2).tobytes() == memory[start : start + LAYOUT.slot_bytes].tobytes()


def test_a_model_without_state_has_no_record() -> None:
    layout = SlotLayout(())
    assert layout.slot_bytes == 0
    state = SlotState(layout, torch.zeros((SLOTS, 0), dtype=torch.uint8), SNAPSHOTS)
    assert (state.slots, state.slot_bytes, state.snapshots) == (SLOTS, 0, 0)
    state.zero(3)
    state.move(3, 1)


def test_a_zeroed_slot_is_as_new(state: SlotState) -> None:
    for slot in range(SLOTS):
        fill(state, slot, slot + 1, 10 + slot)
    state.zero(1)
    assert [content(state, slot) for slot in range(SLOTS)] == [
        (1, 1, 1, 10),
        (0, 0, 0, 0),
        (3, 3, 3, 12),
        (4, 4, 4, 13),
    ]


def test_moving_copies_all_of_a_slot(state: SlotState) -> None:
    fill(state, 3, 7, 20)
    fill(state, 0, 1, 2)
    state.move(3, 1)
    assert content(state, 1) == (7, 7, 7, 20)
    assert content(state, 0) == (1, 1, 1, 2)
    state.move(3, 3)
    assert content(state, 3) == (7, 7, 7, 20)


def test_followers_are_zeroed_and_moved_along(state: SlotState) -> None:
    noted = Noted()
    state.follow(noted)
    state.zero(1)
    state.move(3, 1)
    state.move(2, 2)
    refused(lambda: state.move(3, SLOTS))
    refused(lambda: state.zero(SLOTS))
    state.save(3, 0)
    state.restore(0, 2)
    assert noted.told == [(1,), (3, 1)]


def test_a_snapshot_is_a_copy(state: SlotState) -> None:
    fill(state, 2, 6, 8)
    state.save(2, 1, 8)
    fill(state, 2, 9, 9)
    state.restore(1, 0)
    state.restore(1, 3)
    assert content(state, 0) == content(state, 3) == (6, 6, 6, 8)
    assert content(state, 2) == (9, 9, 9, 9)


def test_a_record_leaves_and_comes_back(state: SlotState) -> None:
    fill(state, 0, 4, 31)
    saved = record(state, 0)
    fill(state, 0, 5, 32)
    state.write(3, saved, 31)
    saved[:] = 0
    assert content(state, 3) == (4, 4, 4, 31)
    assert content(state, 0) == (5, 5, 5, 32)


@pytest.mark.parametrize("bad", [-1, SLOTS])
def test_slots_and_snapshots_that_are_not_there_are_refused(state: SlotState, bad: int) -> None:
    fill(state, 0, 4, 31)
    state.save(0, 0)
    saved = record(state, 0)
    for action in (
        lambda: state.zero(bad),
        lambda: state.move(bad, 0),
        lambda: state.move(0, bad),
        lambda: state.save(bad, 0),
        lambda: state.restore(0, bad),
        lambda: state.read(bad, saved),
        lambda: state.write(bad, saved, 31),
        lambda: state.count(bad),
    ):
        assert f"slot {bad}: this device has 4 slots" in refused(action)
    state.save(0, 0)
    for action in (lambda: state.save(0, bad), lambda: state.restore(bad, 0)):
        assert f"snapshot {bad}: this device has 2 places" in refused(action)
    assert content(state, 0) == (4, 4, 4, 31)


def test_a_record_of_another_count_is_refused(state: SlotState) -> None:
    fill(state, 0, 4, 31)
    saved = record(state, 0)
    assert "a record of 31 tokens for slot 1, where 30 are expected" in refused(lambda: state.write(1, saved, 30))
    assert content(state, 1) == (0, 0, 0, 0)
    assert "slot 0 holds the state after 31 tokens, not 30" in refused(lambda: state.save(0, 1, 30))


def test_a_snapshot_that_could_not_be_made_holds_nothing(state: SlotState) -> None:
    fill(state, 0, 4, 31)
    assert "snapshot 1 holds nothing" in refused(lambda: state.restore(1, 2))
    state.save(0, 1, 31)
    refused(lambda: state.save(0, 1, 32))
    assert "snapshot 1 holds nothing" in refused(lambda: state.restore(1, 2))
    assert content(state, 2) == (0, 0, 0, 0)


def test_a_step_that_does_not_end_leaves_nothing_to_use(pool: KvPool, state: SlotState) -> None:
    fill(state, 0, 4, 31)
    state.begin_step([0, 2], [2])
    assert state.count(0) == state.count(2) == UNKNOWN
    for action in (lambda: state.save(0, 1), lambda: state.save(0, 1, 31), lambda: state.require(0, 31)):
        assert "slot 0 was in a step that failed" in refused(action)
    state.move(0, 3)
    assert "slot 3 was in a step that failed" in refused(lambda: state.require(3, None))
    assert pool.bytes_view()[pool.slot_offset(0) :][:8].view(np.int64)[0] == UNKNOWN
    state.zero(0)
    assert state.require(0, 0) == 0


def test_a_fresh_slot_begins_as_zeros(state: SlotState) -> None:
    for slot in (0, 1, 2):
        fill(state, slot, 8, 5)
    state.begin_step([0, 1], [1])
    state.end_step([0, 1], [6, 1])
    assert content(state, 0) == (8, 8, 8, 6)
    assert content(state, 1) == (0, 0, 0, 1)
    assert content(state, 2) == (8, 8, 8, 5)


def test_what_a_transport_wrote_is_noticed(pool: KvPool, state: SlotState) -> None:
    fill(state, 0, 4, 31)
    memory = pool.bytes_view()
    memory[pool.slot_offset(2) :][: LAYOUT.slot_bytes] = memory[pool.slot_offset(0) :][: LAYOUT.slot_bytes]
    assert state.require(2, 31) == 31
    assert content(state, 2) == (4, 4, 4, 31)
    assert "slot 3 holds the state after 0 tokens, not 31" in refused(lambda: state.require(3, 31))
