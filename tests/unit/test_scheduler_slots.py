"""Slots and snapshots under the real scheduler, on the device whose state must see each token once."""

from typing import Any

import pytest
from kv_machine import expected_output
from scheduler_drive import Stepper, decode_scheduler, request

from scheduler.commands import Submit
from scheduler.effects import MarconiCheckpoint, ReleaseSeq, SsmSnapshotRestore
from scheduler.slots import SlotLimits

PROMPT = list(range(11))


def hybrid(slots: int = 4, snapshots: int = 4, blocks: int = 40, **options: Any) -> Stepper:
    state = SlotLimits(slots, snapshots, recurrent=True)
    scheduler = decode_scheduler(blocks, state=state, **options)
    return Stepper(scheduler, slots=slots, snapshots=snapshots, recurrent=True)


def run(stepper: Stepper) -> None:
    """As the step loop does: it goes on where there was nothing to launch, but something for the device to do."""
    for _ in range(100):
        stepper.step()
        if stepper.scheduler.is_drained:
            return
    raise AssertionError("still running after 100 rounds")


def serve(stepper: Stepper, name: str, prompt: list[int], n: int = 3) -> None:
    stepper.scheduler.apply(Submit(request(name, prompt, n)))
    run(stepper)
    assert stepper.tokens[name] == expected_output(prompt, n)


def fail_next(stepper: Stepper, kind: type[Any]) -> list[Any]:
    """The device fails the next effect of this kind, once. Returns what it failed."""
    failed: list[Any] = []
    apply = stepper.device.apply

    def fails(effect: Any) -> Any:
        if isinstance(effect, kind) and not failed:
            failed.append(effect)
            stepper.device.fail_effects = {len(stepper.device.effects)}
        return apply(effect)

    stepper.device.apply = fails
    return failed


def asked(stepper: Stepper, kind: type[Any]) -> int:
    return sum(isinstance(effect, kind) for effect in stepper.effects)


def test_a_shared_prefix_is_computed_once() -> None:
    stepper = hybrid()
    serve(stepper, "a", PROMPT)
    serve(stepper, "b", [*PROMPT[:9], 77, 78])
    assert asked(stepper, SsmSnapshotRestore) == 1
    assert stepper.device.computed["b"] == len(PROMPT) - 8 + 2


@pytest.mark.parametrize(
    ("options", "steps"), [({}, 2), ({"snapshots": 0}, 1), ({"prefix_caching": False}, 1)], ids=str
)
def test_a_prompt_is_cut_where_a_snapshot_can_be_taken_and_nowhere_else(options: dict[str, Any], steps: int) -> None:
    stepper = hybrid(**options)
    serve(stepper, "a", PROMPT, 1)
    assert len(stepper.plans) == steps


@pytest.mark.parametrize("slots", [1, 4])
def test_a_snapshot_that_cannot_be_restored_is_forgotten_and_its_prefix_computed(slots: int) -> None:
    stepper = hybrid(slots=slots)
    serve(stepper, "a", PROMPT)
    failed = fail_next(stepper, SsmSnapshotRestore)
    serve(stepper, "b", PROMPT)
    assert len(failed) == 1
    assert stepper.device.computed["b"] == len(PROMPT) + 2
    stepper.boundary()
    assert stepper.launch() is None
    assert stepper.scheduler.kv.slots.free == slots


def test_a_snapshot_that_cannot_be_made_is_not_looked_for() -> None:
    stepper = hybrid()
    failed = fail_next(stepper, MarconiCheckpoint)
    serve(stepper, "a", PROMPT)
    assert len(failed) == 1
    serve(stepper, "b", PROMPT)
    assert asked(stepper, SsmSnapshotRestore) == 0


def test_who_was_to_go_on_from_a_snapshot_that_could_not_be_made_computes_it() -> None:
    """Its place holds another prompt's state of the same length, which must not be taken for the right one."""
    stepper = hybrid(snapshots=1)
    serve(stepper, "other", [90, 91, 92, 93, 94, 95, 96, 97, 98])
    stepper.scheduler.apply(Submit(request("a", PROMPT, 3)))
    stepper.step()  # up to the block's end; the checkpoint is asked for at the next boundary
    stepper.scheduler.apply(Submit(request("b", PROMPT, 3)))
    failed = fail_next(stepper, MarconiCheckpoint)
    run(stepper)
    assert len(failed) == 1
    assert asked(stepper, SsmSnapshotRestore) == 1
    assert stepper.tokens["a"] == stepper.tokens["b"] == expected_output(PROMPT, 3)


def test_a_slot_is_nobodys_until_the_device_has_zeroed_it() -> None:
    stepper = hybrid(slots=1)
    slots = stepper.scheduler.kv.slots
    stepper.scheduler.apply(Submit(request("a", PROMPT, 1)))
    while "a" not in stepper.finishes:
        stepper.step()
    assert not slots.has_room
    stepper.scheduler.apply(Submit(request("b", PROMPT, 1)))
    stepper.boundary()
    effects = stepper.scheduler.prepare()
    assert [type(effect) for effect in effects if not isinstance(effect, MarconiCheckpoint)] == [ReleaseSeq]
    assert not slots.has_room
    for effect in effects:
        stepper.scheduler.effect_settled(effect, stepper.device.apply(effect))
    assert slots.has_room
    run(stepper)
    assert stepper.tokens["b"] == expected_output(PROMPT, 1)
