"""Commands while a step runs: what starts something and CancelRequest are applied, all else waits for the boundary."""

import pytest
from handoff_drive import (
    DestinationNode,
    SourceNode,
    launch_step,
    phase_of,
    refuse,
    reserved_in,
    settle_step,
    snapshot,
    wind_down,
)
from kv_machine import expected_output
from scheduler_drive import handoff, request

from scheduler.commands import (
    ActivateDestination,
    Applied,
    CancelDestination,
    CancelRequest,
    CancelSource,
    Command,
    DestinationAccepted,
    Noop,
    ReleaseSource,
    ReserveDestination,
    Submit,
    SubmitHandoffPrefill,
    Submitted,
)
from scheduler.errors import StepInFlight
from scheduler.events import DestinationFinished, DestinationReserved
from scheduler.ids import RequestId
from scheduler.request import FinishReason

H = handoff("h")
PROMPT = tuple(range(10))
OTHER = tuple(range(50, 60))


def busy_source() -> SourceNode:
    """`held` is held, and a step of `local` runs."""
    node = SourceNode()
    node.hold("held", PROMPT)
    node.scheduler.apply(Submit(request("local", OTHER, 8)))
    return node


def busy_destination(blocks: int = 16) -> DestinationNode:
    """`landed` has landed, and a step of `running` runs."""
    node = DestinationNode(blocks)
    node.serve("running", OTHER)
    node.reserve("landed", PROMPT)
    node.land("landed", PROMPT)
    return node


@pytest.mark.parametrize("command", [ReleaseSource(handoff("held")), CancelSource(handoff("held"))])
def test_a_boundary_command_waits_at_a_source(command: Command) -> None:
    node = busy_source()
    plan = launch_step(node)
    refuse(node.scheduler, command, StepInFlight, f"{type(command).__name__} came while a step runs")
    node.settle(plan)
    assert node.scheduler.apply(command).retired == ("held",)


@pytest.mark.parametrize("command", [ActivateDestination(handoff("landed")), CancelDestination(handoff("landed"))])
def test_a_boundary_command_waits_at_a_destination(command: Command) -> None:
    node = busy_destination()
    plan = launch_step(node)
    refuse(node.scheduler, command, StepInFlight, f"{type(command).__name__} came while a step runs")
    node.settle(plan)
    assert node.scheduler.apply(command).result == Applied()


@pytest.mark.parametrize("name", ["unknown", "landed"])
def test_a_boundary_command_waits_even_if_it_addresses_nothing(name: str) -> None:
    """Whether it does is known at the boundary only."""
    node = busy_destination()
    launch_step(node)
    refuse(node.scheduler, CancelDestination(handoff(name), 2), StepInFlight)


def test_a_submit_is_accepted_and_runs_with_the_next_step() -> None:
    node = busy_source()
    plan = launch_step(node)
    effects = node.scheduler.apply(Submit(request("late", [7, 7], 1)))
    assert (effects.result, effects.events, effects.retired) == (Submitted(RequestId("late")), (), ())
    effects = node.submit("h", [8] * 5)
    assert (effects.result, effects.events, effects.retired) == (Submitted(RequestId("h")), (), ())
    node.settle(plan)
    node.step()
    assert node.plans[-1] == "prefill local[10..10], late[0..1], h[0..4]"
    assert phase_of(node.scheduler, "h") == "held"


def test_a_reservation_is_accepted_and_made_at_the_boundary() -> None:
    node = busy_destination()
    plan = launch_step(node)
    before = node.scheduler.metrics()
    effects = node.scheduler.apply(ReserveDestination(H, request("h", [7] * 5)))
    assert (effects.result, effects.events) == (DestinationAccepted(RequestId("h")), ())
    assert phase_of(node.scheduler, "h") == "pending"
    assert node.scheduler.metrics().free == before.free
    node.settle(plan)
    assert node.boundary().events == (DestinationReserved(H, 1, RequestId("h"), prompt_blocks=2, missing_blocks=2),)


def test_reservations_keep_their_order_across_the_end_of_a_step() -> None:
    node = busy_destination()
    plan = launch_step(node)
    for name in ("x", "y"):
        assert node.reserve(name, [ord(name)] * 5) == []
    node.settle(plan)
    # The command is an occasion to try the head, which is not what it accepts.
    assert node.reserve("z", [1] * 5) == ["x"]
    assert [reserved_in(node.boundary().events) for _ in range(3)] == [["y"], ["z"], []]


def test_a_reservation_that_is_cancelled_before_the_boundary_is_never_made() -> None:
    node = busy_destination()
    plan = launch_step(node)
    node.reserve("h", [7] * 5)
    node.settle(plan)
    effects = node.scheduler.apply(CancelDestination(H))
    assert (effects.retired, effects.events) == (("h",), ())
    assert node.boundary().events == ()


def test_a_rejected_command_leaves_the_step_as_it_is() -> None:
    node = busy_destination()
    plan = launch_step(node)
    refuse(node.scheduler, ReserveDestination(handoff("landed"), request("h", [1])), match="already a destination")
    refuse(node.scheduler, Submit(request("running", [1])), match="already active")
    refuse(node.scheduler, Submit(request("long", range(300))), match="positions")
    node.settle(plan)
    node.run()
    assert node.tokens["running"] == expected_output(OTHER, 4)[1:]


def test_a_cancelled_row_is_doomed() -> None:
    """It retires at once and has no output; its blocks come back when the step that writes them is settled."""
    node = busy_destination()
    plan = launch_step(node)
    effects = node.scheduler.apply(CancelRequest(RequestId("running")))
    assert (effects.result, effects.retired) == (Applied(), ("running",))
    assert not effects.suppressed_pending_output
    node.scheduler.check()
    assert phase_of(node.scheduler, "running") is None
    metrics = node.scheduler.metrics()
    assert (metrics.draining, metrics.running, metrics.free) == (3, 0, 10)
    node.settle(plan)
    assert node.boundary().is_empty
    assert node.scheduler.metrics().draining == 0
    # Two of the three blocks were full when the request was activated; the last is not trusted.
    assert (node.scheduler.metrics().free, node.scheduler.metrics().cached) == (11, 2)
    wind_down(node)


def test_a_doomed_prompt_publishes_nothing_of_its_last_step() -> None:
    node = SourceNode()
    node.submit("h", range(40))
    node.step()
    plan = launch_step(node)
    assert node.scheduler.apply(CancelRequest(RequestId("h"))).retired == ("h",)
    node.settle(plan)
    assert node.boundary().is_empty
    assert (node.scheduler.metrics().cached, node.scheduler.metrics().free) == (4, 12)
    assert node.scheduler.is_drained


def test_a_doomed_source_that_this_step_would_finish_is_never_held() -> None:
    node = SourceNode()
    node.submit("h", PROMPT)
    plan = launch_step(node)
    node.scheduler.apply(CancelRequest(RequestId("h")))
    node.settle(plan)
    assert node.boundary().is_empty
    assert node.scheduler.apply(CancelSource(H)).result == Noop()
    assert node.scheduler.counters.prompt_tokens == 0


def test_a_doomed_row_in_a_failed_step_gives_its_blocks_back() -> None:
    node = DestinationNode(fail_at={0})
    node.serve("h", PROMPT)
    node.serve("other", OTHER)
    plan = launch_step(node)
    node.scheduler.apply(CancelRequest(RequestId("h")))
    node.settle(plan)
    boundary = node.boundary()
    assert boundary.events == (DestinationFinished(handoff("other"), 1, RequestId("other"), FinishReason.ERROR),)
    assert [output.request_id for output in boundary.outputs] == ["other"]
    assert boundary.retired == ("other",)
    assert node.scheduler.is_drained


def test_others_in_the_step_of_a_doomed_row_go_on() -> None:
    node = DestinationNode()
    for name, prompt in (("h", PROMPT), ("other", OTHER)):
        node.serve(name, prompt)
    plan = launch_step(node)
    node.scheduler.apply(CancelRequest(RequestId("h")))
    node.settle(plan)
    node.run()
    assert node.tokens == {"other": expected_output(OTHER, 4)[1:]}


def test_a_second_cancel_of_a_doomed_row_finds_nothing() -> None:
    node = busy_destination()
    launch_step(node)
    node.scheduler.apply(CancelRequest(RequestId("running")))
    before = snapshot(node.scheduler)
    effects = node.scheduler.apply(CancelRequest(RequestId("running"), discard_pending_output=True))
    assert (effects.result, effects.retired) == (Noop(), ())
    assert snapshot(node.scheduler) == before


def test_the_ids_of_a_doomed_row_are_free_at_once() -> None:
    node = busy_destination()
    plan = launch_step(node)
    node.scheduler.apply(CancelRequest(RequestId("running")))
    assert node.reserve("running", [7] * 5) == []
    node.settle(plan)
    boundary = node.boundary()
    assert (list(boundary.outputs), boundary.retired) == ([], ())
    assert reserved_in(boundary.events) == ["running"]
    node.land("running", [7] * 5)
    node.scheduler.apply(ActivateDestination(handoff("running")))
    node.run()
    assert node.tokens["running"] == expected_output([7] * 5, 4)[1:]


def test_a_waiting_request_is_cancelled_while_another_ones_step_runs() -> None:
    node = busy_source()
    plan = launch_step(node)
    node.scheduler.apply(Submit(request("late", [7, 7])))
    assert node.scheduler.apply(CancelRequest(RequestId("late"))).retired == ("late",)
    node.settle(plan)
    node.run()
    assert node.tokens == {"held": expected_output(PROMPT, 1), "local": expected_output(OTHER, 8)}


def test_what_waits_for_the_handoff_limit_is_cancelled_mid_step() -> None:
    node = SourceNode(max_handoffs=1)
    node.submit("first", OTHER)
    node.submit("h", PROMPT)
    plan = launch_step(node)
    assert node.scheduler.apply(CancelRequest(RequestId("h"))).retired == ("h",)
    node.settle(plan)
    node.boundary()
    assert node.scheduler.apply(ReleaseSource(handoff("first"))).retired == ("first",)
    assert node.scheduler.is_drained


def test_parked_kv_is_not_touched_by_a_mid_step_cancel() -> None:
    node = busy_destination()
    node.reserve("h", [7] * 5)
    launch_step(node)
    before = snapshot(node.scheduler)
    for name in ("landed", "h", "unknown"):
        assert node.scheduler.apply(CancelRequest(RequestId(name))).result == Noop()
    assert snapshot(node.scheduler) == before


def test_commands_at_the_boundary_take_effect_in_their_order() -> None:
    for first, second, outcome in (
        (ActivateDestination, CancelDestination, [Applied(), Applied()]),
        (CancelDestination, ActivateDestination, [Applied(), Noop()]),
    ):
        node = busy_destination()
        settle_step(node)
        results = [node.scheduler.apply(kind(handoff("landed"))).result for kind in (first, second)]
        assert results == outcome
        assert phase_of(node.scheduler, "landed") is None


def test_a_deferred_command_finds_the_settled_state() -> None:
    """It was sent while the last token was computed; when it is applied the request has ended."""
    node = DestinationNode()
    node.serve("h", PROMPT, 2)
    plan = launch_step(node)
    refuse(node.scheduler, CancelDestination(H), StepInFlight)
    node.settle(plan)
    assert node.scheduler.apply(CancelDestination(H)).result == Noop()
    assert node.boundary().events == (DestinationFinished(H, 1, RequestId("h"), FinishReason.LENGTH),)


def test_an_activation_between_settlement_and_boundary_runs_with_the_next_step() -> None:
    node = busy_destination()
    settle_step(node)
    node.scheduler.apply(ActivateDestination(handoff("landed")))
    node.step()
    assert node.plans[-1] == "decode running[11..11], landed[10..10]"


def test_bytes_that_land_during_a_step_run_with_the_next() -> None:
    node = busy_destination()
    node.reserve("h", [7] * 5, armed=True)
    plan = launch_step(node)
    assert node.land("h", [7] * 5)
    assert phase_of(node.scheduler, "h") == "active"
    refuse(node.scheduler, ActivateDestination(H), StepInFlight)
    node.settle(plan)
    assert node.scheduler.apply(ActivateDestination(H)).result == Applied()
    node.step()
    assert node.plans[-1] == "decode running[11..11], h[5..5]"


def test_a_transport_that_gets_quiet_during_a_step_is_told_at_the_boundary() -> None:
    node = busy_destination()
    node.reserve("h", [7] * 5)
    node.scheduler.transfer_started(H, 1)
    node.scheduler.apply(CancelDestination(H))
    plan = launch_step(node)
    node.scheduler.transfer_quiet(H, 1)
    node.settle(plan)
    assert node.boundary().retired == ("h",)
    assert node.scheduler.metrics().draining == 0


def test_a_mid_step_command_does_not_tell_of_the_step() -> None:
    """Its effects are its own; what the step brings stays hidden until the boundary."""
    node = SourceNode()
    node.submit("h", PROMPT)
    plan = launch_step(node)
    effects = node.scheduler.apply(Submit(request("late", [1])))
    assert (effects.events, effects.retired) == ((), ())
    node.settle(plan)
    effects = node.scheduler.apply(SubmitHandoffPrefill(handoff("next"), request("next", [2])))
    assert (effects.events, effects.retired) == ((), ())
    assert len(node.boundary().events) == 1
