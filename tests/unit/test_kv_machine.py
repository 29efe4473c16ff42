"""The oracle device: its effects do what they say, and it notices when they are misused."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from kv_machine import KvMachine, expected_output
from rows import make_row

from scheduler.contract import Decode, DeviceError, Draw, Fault, Prefill, Row
from scheduler.effects import (
    CopyBlocks,
    Done,
    DropSequenceState,
    Effect,
    Exhausted,
    Quiesce,
    RestoreSequenceState,
    Saved,
    SaveSequenceState,
)
from scheduler.ids import BlockId, RequestId
from scheduler.request import SamplingParams

PROMPT = [4, 8, 15, 16, 23]
A = RequestId("a")


def machine(**options: Any) -> KvMachine:
    return KvMachine(8, 4, **options)


def run(device: KvMachine, row: Row) -> int | None:
    plan = Decode((row,)) if row.count == 1 else Prefill((row,))
    (token,) = device.await_result(device.launch(plan)).tokens
    return token


def prefill(device: KvMachine, blocks: Sequence[int]) -> int | None:
    return run(device, make_row("a", PROMPT, 0, blocks, Draw(SamplingParams())))


def decode(device: KvMachine, blocks: Sequence[int]) -> int | None:
    past = PROMPT
    return run(device, make_row("a", expected_output(PROMPT, 1), len(past), blocks, Draw(SamplingParams()), past))


def save(blocks: Sequence[int], tokens: int) -> SaveSequenceState:
    return SaveSequenceState(A, tuple(BlockId(block) for block in blocks), tokens)


def restore(blocks: Sequence[int], tokens: int) -> RestoreSequenceState:
    return RestoreSequenceState(A, tuple(BlockId(block) for block in blocks), tokens)


def copy(*pairs: tuple[int, int]) -> CopyBlocks:
    return CopyBlocks(tuple((BlockId(source), BlockId(target)) for source, target in pairs))


def test_a_restored_sequence_goes_on_elsewhere() -> None:
    device = machine()
    first, second = expected_output(PROMPT, 2)
    assert prefill(device, [3, 6]) == first
    before = device.pool.copy()
    assert device.apply(save([3, 6], 5)) == Saved(64)
    assert np.array_equal(device.pool, before)
    assert list(device.saved) == [A]
    run(device, make_row("b", [1] * 8, 0, [6, 3]))
    assert device.apply(restore([6, 1], 5)) == Done()
    assert not device.saved
    assert decode(device, [6, 1]) == second


def test_a_copied_block_serves_as_the_first() -> None:
    device = machine()
    prefill(device, [3, 6])
    assert device.apply(copy((3, 0), (6, 3), (0, 6))) == Done()
    assert decode(device, [6, 3]) == expected_output(PROMPT, 2)[1]
    assert device.apply(Quiesce()) == Done()
    assert len(device.effects) == 1


def test_the_spill_store_is_bounded() -> None:
    device = machine(spill_blocks=1)
    assert device.apply(save([0, 1], 5)) == Exhausted()
    assert not device.saved
    assert device.apply(save([0], 4)) == Saved(32)
    assert device.apply(DropSequenceState(A)) == device.apply(DropSequenceState(A)) == Done()
    assert device.apply(save([0], 4)) == Saved(32)


def test_chosen_effects_fail() -> None:
    device = machine(fail_effects={0, 1, 3, 5})
    prefill(device, [3, 6])
    before = device.pool.copy()
    effects: list[Effect] = [copy((3, 0)), save([3, 6], 5), save([3, 6], 5), restore([0, 1], 5), save([3, 6], 5)]
    for ordinal, effect in enumerate([*effects, DropSequenceState(A)]):
        device.apply(Quiesce())
        if ordinal in device.fail_effects:
            with pytest.raises(DeviceError, match=f"effect {ordinal}") as caught:
                device.apply(effect)
            assert caught.value.fault is Fault.EFFECT
        else:
            device.apply(effect)
        assert bool(device.saved) == (ordinal in {2, 4})
    assert np.array_equal(device.pool, before)


@pytest.mark.parametrize(
    ("effect", "message"),
    [
        (copy((0, 1), (2, 1)), "write one block"),
        (copy((2, 2)), "onto itself"),
        (copy((0, 8)), "no such block"),
        (save([4], 4), "saved already"),
        (restore([4, 5], 4), "4 tokens in 2 blocks"),
        (restore([4, 5], 5), "another number of tokens"),
        (restore([8], 4), "no such block"),
        (RestoreSequenceState(RequestId("b"), (BlockId(0),), 4), "not saved"),
        (SaveSequenceState(RequestId("b"), (BlockId(0), BlockId(0)), 5), "twice"),
    ],
)
def test_misuse_is_noticed(effect: Effect, message: str) -> None:
    device = machine()
    device.apply(save([0], 4))
    with pytest.raises(AssertionError, match=message):
        device.apply(effect)


def test_a_step_and_its_effects_keep_apart() -> None:
    device = machine()
    row = make_row("a", PROMPT, 0, [0, 1], Draw(SamplingParams()))
    ticket = device.launch(Prefill((row,)))
    with pytest.raises(AssertionError, match="in flight"):
        device.apply(copy((0, 2)))
    row.end -= 1
    with pytest.raises(AssertionError, match="changed"):
        device.await_result(ticket)


def test_a_spilled_sequence_does_not_run() -> None:
    device = machine()
    prefill(device, [0, 1])
    device.apply(save([0, 1], 5))
    with pytest.raises(AssertionError, match="spilled"):
        decode(device, [0, 1])


def test_a_token_that_is_known_is_not_drawn() -> None:
    row = make_row("a", PROMPT, 0, [0, 1], Draw(SamplingParams()))
    row.end -= 1
    with pytest.raises(AssertionError, match="known"):
        run(machine(), row)
