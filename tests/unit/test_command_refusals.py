"""Commands that are refused: each by its typed error, and with everything as it was before."""

import pytest
from handoff_drive import DestinationNode, SourceNode, launch_step, phase_of, refuse, settle_step, snapshot
from kv_machine import expected_output
from scheduler_drive import Stepper, handoff, request

from scheduler.commands import (
    ActivateDestination,
    Applied,
    CancelDestination,
    CancelRequest,
    CancelSource,
    Command,
    ReleaseSource,
    ReserveDestination,
    Submit,
    SubmitHandoffPrefill,
)
from scheduler.errors import CommandRejected, InvariantBroken, StaleIncarnation, StepInFlight
from scheduler.ids import RequestId
from scheduler.policies import Preemption, SchedulingPolicy

H = handoff("h")
PROMPT = tuple(range(10))
OTHER = tuple(range(50, 60))

SOURCE_ONLY: list[Command] = [
    SubmitHandoffPrefill(handoff("new"), request("new", [1])),
    ReleaseSource(H),
    CancelSource(H),
]
DESTINATION_ONLY: list[Command] = [
    ReserveDestination(handoff("new"), request("new", [1])),
    ActivateDestination(H),
    CancelDestination(H),
]
BOTH: list[Command] = [Submit(request("new", [1])), CancelRequest(RequestId("h"))]


def name_of(command: Command) -> str:
    return type(command).__name__


def busy_source() -> SourceNode:
    """Held, pending and local work with a lease and ages, so that a change of anything would show."""
    node = SourceNode(lease_s=30.0, incarnation=7)
    node.hold("h", PROMPT)
    node.scheduler.apply(Submit(request("local", OTHER, 8)))
    node.step()
    node.submit("waiting", [7] * 9)
    return node


def busy_destination() -> DestinationNode:
    """A landed, a running and a pending handoff, and local work."""
    node = DestinationNode(10, lease_s=30.0, incarnation=7)
    node.serve("running", OTHER, 8)
    node.step()
    node.reserve("h", PROMPT)
    node.land("h", PROMPT)
    node.scheduler.apply(Submit(request("local", [3], 2)))
    node.reserve("pending", [7] * 23)
    return node


@pytest.mark.parametrize("command", DESTINATION_ONLY, ids=name_of)
def test_a_destination_command_is_none_for_a_prefill_scheduler(command: Command) -> None:
    refuse(busy_source().scheduler, command, match=f"{name_of(command)} is not a command for a PrefillScheduler")


@pytest.mark.parametrize("command", SOURCE_ONLY, ids=name_of)
def test_a_source_command_is_none_for_a_decode_scheduler(command: Command) -> None:
    refuse(busy_destination().scheduler, command, match=f"{name_of(command)} is not a command for a DecodeScheduler")


@pytest.mark.parametrize("command", [*SOURCE_ONLY, *BOTH], ids=name_of)
@pytest.mark.parametrize("meant", [6, 8])
def test_a_command_for_another_life_of_a_prefill_node_changes_nothing(command: Command, meant: int) -> None:
    node = busy_source()
    refuse(node.scheduler, command, StaleIncarnation, f"is for incarnation {meant} of this node, which is at 7", meant)
    assert node.scheduler.apply(command, 7).incarnation == 7


@pytest.mark.parametrize("command", [*DESTINATION_ONLY, *BOTH], ids=name_of)
def test_a_command_for_another_life_of_a_decode_node_changes_nothing(command: Command) -> None:
    node = busy_destination()
    refuse(node.scheduler, command, StaleIncarnation, "what it addresses is gone", 6)
    assert node.scheduler.apply(command, 7).incarnation == 7


def test_the_incarnation_is_asked_for_before_the_step() -> None:
    """A sender of an earlier life must not be told to come again at the boundary."""
    node = busy_source()
    assert node.launch() is not None
    refuse(node.scheduler, CancelSource(H), StaleIncarnation, incarnation=6)
    refuse(node.scheduler, CancelSource(H), StepInFlight, incarnation=7)


STALE_ATTEMPTS = [(ReleaseSource, 1), (ReleaseSource, 3), (CancelSource, 1), (CancelSource, 3)]


@pytest.mark.parametrize(("kind", "attempt"), STALE_ATTEMPTS)
def test_a_stale_attempt_addresses_no_source(kind: type[ReleaseSource] | type[CancelSource], attempt: int) -> None:
    node = SourceNode(lease_s=30.0)
    node.scheduler.apply(SubmitHandoffPrefill(H, request("h", PROMPT), attempt=2))
    node.run()
    before = snapshot(node.scheduler)
    effects = node.scheduler.apply(kind(H, attempt))
    assert (effects.retired, effects.events) == ((), ())
    node.scheduler.transfer_started(H, attempt)
    assert snapshot(node.scheduler) == before
    assert node.scheduler.apply(kind(H, 2)).retired == ("h",)


@pytest.mark.parametrize("kind", [ActivateDestination, CancelDestination])
def test_a_stale_attempt_addresses_no_destination(
    kind: type[ActivateDestination] | type[CancelDestination],
) -> None:
    node = DestinationNode(lease_s=30.0)
    node.scheduler.apply(ReserveDestination(H, request("h", PROMPT), attempt=2))
    before = snapshot(node.scheduler)
    assert not node.scheduler.landed(H, 1, first_token=5)
    node.scheduler.transfer_started(H, 1)
    assert snapshot(node.scheduler) == before
    assert node.scheduler.landed(H, 2, expected_output(PROMPT, 1)[0])
    before = snapshot(node.scheduler)
    node.scheduler.apply(kind(H, 1))
    assert snapshot(node.scheduler) == before
    assert node.scheduler.apply(kind(H, 2)).result == Applied()


def test_a_stale_attempt_does_not_suppress_what_the_new_one_has_ready() -> None:
    node = SourceNode()
    node.scheduler.apply(SubmitHandoffPrefill(H, request("h", PROMPT), attempt=2))
    settle_step(node)
    assert not node.scheduler.apply(CancelSource(H, 1)).suppressed_pending_output
    boundary = node.boundary()
    assert [output.token for output in boundary.outputs] == expected_output(PROMPT, 1)
    assert len(boundary.events) == 1


def test_a_rejected_submit_is_atomic() -> None:
    """Neither the handoff nor the request is known after it, and the same ids work with a request that fits."""
    node = SourceNode(blocks=3)
    refuse(node.scheduler, SubmitHandoffPrefill(H, request("h", range(13))), match="4 KV blocks, the node has 3")
    refuse(node.scheduler, Submit(request("h", range(10), 4)), match="4 KV blocks, the node has 3")
    assert node.scheduler.story(RequestId("h")) == ()
    node.hold("h", range(12))


def test_the_length_limit_counts_positions_that_need_kv() -> None:
    """The last sampled token's KV is never computed, so prompt + max_tokens may exceed the positions by one."""
    node = DestinationNode(blocks=8, max_model_len=16)
    refuse(node.scheduler, Submit(request("a", range(12), 6)), match="exceed the model's 16 positions")
    node.scheduler.apply(Submit(request("a", range(12), 5)))
    node.run()
    assert node.tokens["a"] == expected_output(range(12), 5)


def test_a_refusal_loses_nothing_that_is_to_be_told() -> None:
    """A retirement that a quiet transport caused is reported by the next command or boundary that succeeds."""
    node = SourceNode()
    node.hold("h", PROMPT)
    node.scheduler.transfer_started(H, 1)
    node.scheduler.apply(ReleaseSource(H))
    node.scheduler.transfer_quiet(H, 1)
    with pytest.raises(CommandRejected):
        node.scheduler.apply(Submit(request("long", range(300))))
    assert node.boundary().retired == ("h",)
    assert node.boundary().is_empty


def about_to_spill() -> DestinationNode:
    """A node that has asked the device for a save and has no answer yet."""
    node = DestinationNode(6, policy=SchedulingPolicy(preemption=Preemption.SPILL))
    node.serve("running", OTHER, 8)
    node.serve("h", PROMPT, 8)
    for _ in range(2):
        node.step()
    return node


@pytest.mark.parametrize("command", [*DESTINATION_ONLY, *BOTH], ids=name_of)
def test_no_command_comes_between_an_effect_and_its_answer(command: Command) -> None:
    node = about_to_spill()
    (effect,) = node.scheduler.prepare()
    refuse(node.scheduler, command, StepInFlight, "before the device answered all effects")
    with pytest.raises(StepInFlight, match="not answered all effects"):
        node.scheduler.boundary(node.now)
    with pytest.raises(StepInFlight, match="not answered all effects"):
        node.scheduler.prepare()
    with pytest.raises(StepInFlight, match="not answered all effects"):
        node.scheduler.plan()
    node.scheduler.effect_settled(effect, node.device.apply(effect))
    assert node.scheduler.apply(CancelRequest(RequestId("h"))).retired == ("h",)


def test_an_effect_is_answered_once() -> None:
    node = about_to_spill()
    (effect,) = node.scheduler.prepare()
    node.scheduler.effect_settled(effect, node.device.apply(effect))
    with pytest.raises(InvariantBroken, match="was not asked for, or is settled already"):
        node.scheduler.effect_settled(effect, None)


def test_the_circle_is_gone_round_in_its_order() -> None:
    node = Stepper(SourceNode().scheduler)
    node.scheduler.apply(Submit(request("a", PROMPT)))
    plan = launch_step(node)
    for part in (lambda: node.scheduler.boundary(1.0), node.scheduler.prepare, node.scheduler.plan):
        with pytest.raises(StepInFlight, match="not settled"):
            part()
    node.settle(plan)
    with pytest.raises(StepInFlight, match="is not released: call boundary first"):
        node.scheduler.prepare()
    with pytest.raises(InvariantBroken, match="no step is in flight"):
        node.scheduler.fail()
    assert len(node.boundary().outputs) == 1
    assert node.launch() is not None


def test_ids_live_from_their_command_to_the_report_of_their_end() -> None:
    """A request that ended in the last step keeps its id until the boundary tells so, for its outputs come there."""
    node = SourceNode()
    node.submit("h", PROMPT, max_tokens=1)
    settle_step(node)
    assert phase_of(node.scheduler, "h") is None
    refuse(node.scheduler, Submit(request("h", [1])), match="already active")
    assert node.boundary().retired == ("h",)
    node.scheduler.apply(Submit(request("h", [1])))
