"""Preemption by spill: what the device is asked to save and restore, and every way in which it can refuse."""

import pytest
from handoff_drive import DestinationNode, SourceNode, wind_down
from kv_machine import expected_output
from scheduler_drive import Stepper, handoff, request

from scheduler.batching import BatchLimits
from scheduler.commands import ActivateDestination, CancelRequest, Submit
from scheduler.effects import DropSequenceState, RestoreSequenceState, SaveSequenceState
from scheduler.ids import RequestId
from scheduler.policies import Preemption, SchedulingPolicy
from scheduler.pressure import PressureCounters

A = RequestId("h")
PROMPT = tuple(range(10))
OTHER = tuple(range(50, 60))
SPILL = SchedulingPolicy(preemption=Preemption.SPILL)


def spilled(max_tokens: int = 8, **device: object) -> DestinationNode:
    """Six blocks for two: `h` gave way at the third step, with 12 tokens of KV in 3 blocks."""
    node = DestinationNode(6, policy=SPILL, **device)
    node.serve("other", OTHER, max_tokens)
    node.serve("h", PROMPT, max_tokens)
    for _ in range(3):
        node.step()
    return node


def counters(node: Stepper) -> PressureCounters:
    return node.scheduler.batcher.pressure.counters


def kinds(node: Stepper) -> list[str]:
    return [type(effect).__name__ for effect in node.effects]


def finish(node: DestinationNode, max_tokens: int = 8) -> None:
    node.run()
    assert node.tokens == {
        "other": expected_output(OTHER, max_tokens)[1:],
        "h": expected_output(PROMPT, max_tokens)[1:],
    }
    assert node.scheduler.is_drained
    assert not node.device.saved


def test_a_state_is_saved_and_restored_whole() -> None:
    node = spilled()
    (save,) = node.effects
    assert isinstance(save, SaveSequenceState)
    assert (save.request_id, len(save.blocks), save.tokens) == ("h", 3, 12)
    assert (node.scheduler.metrics().spilled, node.scheduler.metrics().preempted) == (1, 0)
    assert list(node.device.saved) == ["h"]
    finish(node)
    restore = node.effects[1]
    assert isinstance(restore, RestoreSequenceState)
    assert (restore.request_id, len(restore.blocks), restore.tokens) == ("h", 3, 12)
    assert kinds(node) == ["SaveSequenceState", "RestoreSequenceState"]
    # Nothing of it was computed twice.
    assert node.device.computed["h"] == 7
    assert counters(node) == PressureCounters(preemptions=1, spills=1, restores=1)


def test_a_restored_request_goes_on_with_a_decode() -> None:
    node = spilled()
    finish(node)
    assert not any(plan.startswith("prefill") for plan in node.plans)
    # It came back with 13 tokens, of which the last has no KV.
    assert next(plan for plan in node.plans[3:] if "h[" in plan).endswith("h[12..12]")


def test_the_story_tells_of_it() -> None:
    node = spilled()
    finish(node)
    lines = [line.what for line in node.scheduler.story(A)]
    assert lines[lines.index("activated") + 1 :] == [
        "preempted: 12 tokens of KV go to the spill store",
        "spilled, 96 bytes",
        "restored, 12 tokens of KV",
        "ended: length",
    ]


def test_a_failed_save_is_computed_again() -> None:
    node = spilled(fail_effects={0})
    assert (node.scheduler.metrics().spilled, node.scheduler.metrics().preempted) == (0, 1)
    assert counters(node) == PressureCounters(preemptions=1, recomputed_tokens=12, spill_failures=1)
    finish(node)
    assert kinds(node) == ["SaveSequenceState"]
    assert counters(node).recomputed_tokens == node.device.computed["h"] - 7
    assert "not spilled: the store failed" in [line.what for line in node.scheduler.story(A)]


def test_a_full_store_is_done_without() -> None:
    node = spilled(spill_blocks=2)
    assert counters(node) == PressureCounters(preemptions=1, recomputed_tokens=12, spill_failures=1)
    finish(node)
    assert kinds(node) == ["SaveSequenceState"]
    assert "not spilled: the store is full" in [line.what for line in node.scheduler.story(A)]


def test_a_failed_restore_is_computed_again() -> None:
    node = spilled(fail_effects={1})
    finish(node)
    assert kinds(node) == ["SaveSequenceState", "RestoreSequenceState"]
    assert counters(node) == PressureCounters(
        preemptions=1, recomputed_tokens=12, spills=1, restores=0, restore_failures=1
    )
    # All 12 positions and the last token, in one chunk of its own.
    assert any("h[0..12]" in plan for plan in node.plans)
    assert "not restored: the store failed" in [line.what for line in node.scheduler.story(A)]


def test_a_cancelled_state_is_dropped_before_the_next_step() -> None:
    node = spilled()
    assert node.scheduler.apply(CancelRequest(A)).retired == ("h",)
    assert list(node.device.saved) == ["h"]
    node.step()
    assert node.effects[1:] == [DropSequenceState(A)]
    assert not node.device.saved
    wind_down(node)


def test_a_state_is_dropped_even_if_nothing_runs_any_more() -> None:
    node = spilled()
    for name in ("other", "h"):
        node.scheduler.apply(CancelRequest(RequestId(name)))
    assert node.run() == []
    assert node.effects[1:] == [DropSequenceState(A)]
    assert not node.device.saved


def test_a_failed_drop_harms_nobody() -> None:
    node = spilled(fail_effects={1})
    node.scheduler.apply(CancelRequest(A))
    node.run()
    assert node.effects[1:] == [DropSequenceState(A)]
    assert node.tokens["other"] == expected_output(OTHER, 8)[1:]


def test_a_request_of_the_same_name_has_a_state_of_its_own() -> None:
    """The store knows states by their request's id."""
    node = spilled()
    node.scheduler.apply(CancelRequest(A))
    node.scheduler.apply(Submit(request("h", [7] * 6, 6)))
    node.run()
    assert kinds(node)[:2] == ["SaveSequenceState", "DropSequenceState"]
    assert node.tokens["h"] == [*expected_output(PROMPT, 3)[1:], *expected_output([7] * 6, 6)]
    assert not node.device.saved


def test_a_drop_makes_room_for_what_is_saved_at_the_same_boundary() -> None:
    node = DestinationNode(9, policy=SPILL, spill_blocks=4)
    prompts = {"x": [1] * 10, "y": [2] * 10, "z": [3] * 10}
    for name, prompt in prompts.items():
        node.serve(name, prompt, 12)
    for _ in range(6):
        node.step()
    assert list(node.device.saved) == ["z"]
    node.scheduler.apply(CancelRequest(RequestId("z")))
    node.step()
    assert kinds(node) == ["SaveSequenceState", "DropSequenceState", "SaveSequenceState"]
    assert list(node.device.saved) == ["y"]
    assert counters(node).spill_failures == 0
    node.run()
    assert {name: node.tokens[name] for name in "xy"} == {name: expected_output(prompts[name], 12)[1:] for name in "xy"}


def test_a_prompt_is_saved_between_its_chunks() -> None:
    """What is saved is what is computed: not the whole prompt, and no drawn token."""
    node = DestinationNode(9, policy=SPILL, limits=BatchLimits(8, 4))
    node.serve("other", OTHER, 10)
    node.step()
    node.scheduler.apply(Submit(request("h", range(100, 124), 2)))
    node.run()
    saves = [effect for effect in node.effects if isinstance(effect, SaveSequenceState)]
    assert [(save.request_id, save.tokens, len(save.blocks)) for save in saves] == [("h", 7, 2)]
    assert node.device.computed["h"] == 24 + 1
    assert node.tokens == {"other": expected_output(OTHER, 10)[1:], "h": expected_output(range(100, 124), 2)}


def test_a_source_node_spills_local_requests() -> None:
    node = SourceNode(6, policy=SPILL)
    for name, prompt in (("other", OTHER), ("h", PROMPT)):
        node.scheduler.apply(Submit(request(name, prompt, 8)))
    node.run()
    assert kinds(node) == ["SaveSequenceState", "RestoreSequenceState"]
    assert node.tokens == {"other": expected_output(OTHER, 8), "h": expected_output(PROMPT, 8)}


def both_ways_at_once(**device: object) -> tuple[DestinationNode, dict[str, list[int]]]:
    """Two give way for two, and the small one of them fits at once into what the large one left over."""
    policy = SchedulingPolicy(preemption=Preemption.SPILL, victim="fewest-outputs")
    node = DestinationNode(10, policy=policy, **device)
    prompts = {"small": [1, 2], "x": [3] * 10, "y": [4] * 10, "large": [5] * 9}
    for name, prompt in prompts.items():
        node.reserve(name, prompt, 8)
        node.land(name, prompt)
    for name in ("x", "y", "large"):
        node.scheduler.apply(ActivateDestination(handoff(name)))
    node.step()
    node.scheduler.apply(ActivateDestination(handoff("small")))
    for _ in range(2):
        node.step()
    return node, prompts


def test_a_victim_comes_back_at_the_boundary_after_the_one_at_which_it_gave_way() -> None:
    node, prompts = both_ways_at_once()
    assert [effect.request_id for effect in node.effects if isinstance(effect, SaveSequenceState)] == ["small", "large"]
    assert kinds(node) == ["SaveSequenceState", "SaveSequenceState"]
    assert node.scheduler.kv.pool.available == 2
    node.step()
    assert kinds(node)[2:] == ["RestoreSequenceState"]
    node.run()
    assert node.tokens == {name: expected_output(prompt, 8)[1:] for name, prompt in prompts.items()}


@pytest.mark.parametrize("device", [{"fail_effects": {0}}, {"spill_blocks": 0}])
def test_what_was_not_saved_is_not_restored(device: dict[str, object]) -> None:
    """Nor for one that finds blocks at the very boundary at which it gave way, whose save has no answer then."""
    node, prompts = both_ways_at_once(**device)
    node.run()
    assert node.tokens == {name: expected_output(prompt, 8)[1:] for name, prompt in prompts.items()}
    assert counters(node).restore_failures == 0
