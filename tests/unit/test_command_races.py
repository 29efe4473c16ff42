"""Every command against every phase of a handoff, on both sides: result, retired ids, and what is left.

The rows of the reference's race matrix (section 1.3) stand below the tables under their own names.
"""

import pytest
from handoff_drive import (
    DestinationNode,
    SourceNode,
    launch_step,
    phase_of,
    refuse,
    reserved_in,
    snapshot,
    wind_down,
)
from kv_machine import expected_output
from scheduler_drive import handoff, request

from scheduler.batching import BatchLimits
from scheduler.commands import (
    ActivateDestination,
    Applied,
    CancelDestination,
    CancelRequest,
    CancelSource,
    Command,
    CommandResult,
    Noop,
    ReleaseSource,
    ReserveDestination,
    Submit,
    SubmitHandoffPrefill,
)
from scheduler.errors import StepInFlight
from scheduler.ids import RequestId
from scheduler.policies import Preemption, SchedulingPolicy

H = handoff("h")
PROMPT = tuple(range(10))
OTHER = tuple(range(50, 60))

COMMANDS: dict[str, Command] = {
    "Release": ReleaseSource(H),
    "CancelSource": CancelSource(H),
    "Activate": ActivateDestination(H),
    "CancelDestination": CancelDestination(H),
    "CancelRequest": CancelRequest(RequestId("h")),
}
APPLIED, NOOP = Applied(), Noop()


def source_in(phase: str) -> SourceNode:
    """A node whose handoff `h` is in this phase."""
    node = SourceNode(max_handoffs=1 if phase == "queued" else 8)
    if phase == "queued":
        node.submit("other", OTHER)
    node.submit("h", range(40) if phase == "chunk" else PROMPT, max_tokens=1 if phase == "finished" else 4)
    if phase in ("queued", "waiting"):
        return node
    node.step()
    if phase in ("sending", "draining"):
        node.scheduler.transfer_started(H, 1)
    if phase in ("draining", "released"):
        node.scheduler.apply(ReleaseSource(H))
    return node


def destination_in(phase: str) -> DestinationNode:
    """A node whose handoff `h` is in this phase."""
    if phase in ("preempted", "spilled"):
        return paused(phase)
    node = DestinationNode(max_reservations=1 if phase == "pending" else 8)
    if phase == "pending":
        node.reserve("other", OTHER)
    node.reserve("h", PROMPT, 2 if phase == "ended" else 4, armed=phase == "armed")
    if phase in ("receiving", "draining"):
        node.scheduler.transfer_started(H, 1)
    if phase == "draining":
        node.scheduler.apply(CancelDestination(H))
    if phase in ("landed", "armed", "ready", "running", "ended"):
        node.land("h", PROMPT)
    if phase in ("ready", "running", "ended"):
        node.scheduler.apply(ActivateDestination(H))
    if phase in ("running", "ended"):
        node.step()
    return node


def paused(phase: str) -> DestinationNode:
    """Two requests that need a fourth block each when six are there: the later one, `h`, has given way."""
    kind = Preemption.SPILL if phase == "spilled" else Preemption.RECOMPUTE
    node = DestinationNode(6, policy=SchedulingPolicy(preemption=kind))
    node.serve("other", OTHER, 8)
    node.serve("h", PROMPT, 8)
    for _ in range(3):
        node.step()
    metrics = node.scheduler.metrics()
    assert (metrics.preempted, metrics.spilled) == ((0, 1) if phase == "spilled" else (1, 0))
    return node


# Columns: phase, command, result, retired, phase after it.
SOURCE_TABLE = [
    ("queued", "Release", APPLIED, False, None),
    ("queued", "CancelSource", APPLIED, True, None),
    ("queued", "CancelRequest", APPLIED, True, None),
    ("waiting", "Release", APPLIED, False, None),
    ("waiting", "CancelSource", APPLIED, True, None),
    ("waiting", "CancelRequest", APPLIED, True, None),
    ("chunk", "Release", APPLIED, False, None),
    ("chunk", "CancelSource", APPLIED, True, None),
    ("chunk", "CancelRequest", APPLIED, True, None),
    ("held", "Release", APPLIED, True, None),
    ("held", "CancelSource", APPLIED, True, None),
    ("held", "CancelRequest", NOOP, False, "held"),
    ("sending", "Release", APPLIED, False, "draining"),
    ("sending", "CancelSource", APPLIED, False, "draining"),
    ("sending", "CancelRequest", NOOP, False, "held"),
    ("draining", "Release", NOOP, False, "draining"),
    ("draining", "CancelSource", NOOP, False, "draining"),
    ("draining", "CancelRequest", NOOP, False, "draining"),
    ("released", "Release", NOOP, False, None),
    ("released", "CancelSource", NOOP, False, None),
    ("released", "CancelRequest", NOOP, False, None),
    ("finished", "Release", NOOP, False, None),
    ("finished", "CancelSource", NOOP, False, None),
    ("finished", "CancelRequest", NOOP, False, None),
]

DESTINATION_TABLE = [
    ("pending", "Activate", NOOP, False, "pending"),
    ("pending", "CancelDestination", APPLIED, True, None),
    ("pending", "CancelRequest", NOOP, False, "pending"),
    ("reserved", "Activate", NOOP, False, "reserved"),
    ("reserved", "CancelDestination", APPLIED, True, None),
    ("reserved", "CancelRequest", NOOP, False, "reserved"),
    ("receiving", "Activate", NOOP, False, "reserved"),
    ("receiving", "CancelDestination", APPLIED, False, "draining"),
    ("receiving", "CancelRequest", NOOP, False, "reserved"),
    ("landed", "Activate", APPLIED, False, "active"),
    ("landed", "CancelDestination", APPLIED, True, None),
    ("landed", "CancelRequest", NOOP, False, "landed"),
    ("armed", "Activate", APPLIED, False, "active"),
    ("armed", "CancelDestination", APPLIED, True, None),
    ("armed", "CancelRequest", APPLIED, True, None),
    ("ready", "Activate", NOOP, False, "active"),
    ("ready", "CancelDestination", APPLIED, True, None),
    ("ready", "CancelRequest", APPLIED, True, None),
    ("running", "Activate", NOOP, False, "active"),
    ("running", "CancelDestination", APPLIED, True, None),
    ("running", "CancelRequest", APPLIED, True, None),
    ("preempted", "Activate", NOOP, False, "active"),
    ("preempted", "CancelDestination", APPLIED, True, None),
    ("preempted", "CancelRequest", APPLIED, True, None),
    ("spilled", "Activate", NOOP, False, "active"),
    ("spilled", "CancelDestination", APPLIED, True, None),
    ("spilled", "CancelRequest", APPLIED, True, None),
    ("draining", "Activate", NOOP, False, "draining"),
    ("draining", "CancelDestination", NOOP, False, "draining"),
    ("draining", "CancelRequest", NOOP, False, "draining"),
    ("ended", "Activate", NOOP, False, None),
    ("ended", "CancelDestination", NOOP, False, None),
    ("ended", "CancelRequest", NOOP, False, None),
]


def try_twice(
    node: SourceNode | DestinationNode, command: Command, result: CommandResult, retired: bool, after: str | None
) -> None:
    """The command has this outcome; a repetition finds nothing to do and changes nothing."""
    effects = node.scheduler.apply(command)
    assert effects.result == result
    assert effects.retired == (("h",) if retired else ())
    assert not effects.suppressed_pending_output
    assert phase_of(node.scheduler, "h") == after
    before = snapshot(node.scheduler)
    again = node.scheduler.apply(command)
    assert (again.result, again.retired, again.events) == (NOOP, (), ())
    assert snapshot(node.scheduler) == before
    wind_down(node)


@pytest.mark.parametrize(("phase", "name", "result", "retired", "after"), SOURCE_TABLE)
def test_commands_at_a_source(phase: str, name: str, result: CommandResult, retired: bool, after: str | None) -> None:
    try_twice(source_in(phase), COMMANDS[name], result, retired, after)


@pytest.mark.parametrize(("phase", "name", "result", "retired", "after"), DESTINATION_TABLE)
def test_commands_at_a_destination(
    phase: str, name: str, result: CommandResult, retired: bool, after: str | None
) -> None:
    try_twice(destination_in(phase), COMMANDS[name], result, retired, after)


@pytest.mark.parametrize("phase", ["queued", "waiting", "chunk", "held", "sending", "draining"])
def test_new_commands_for_a_live_source_are_refused(phase: str) -> None:
    scheduler = source_in(phase).scheduler
    refuse(scheduler, SubmitHandoffPrefill(H, request("new", [1])), match="handoff h is already a source")
    refuse(scheduler, SubmitHandoffPrefill(H, request("new", [1]), attempt=2), match="already a source")
    refuse(scheduler, SubmitHandoffPrefill(handoff("new"), request("h", [1])), match="request id h is already active")
    refuse(scheduler, Submit(request("h", [1])), match="already active")


@pytest.mark.parametrize(
    "phase",
    ["pending", "reserved", "receiving", "landed", "armed", "ready", "running", "preempted", "spilled", "draining"],
)
def test_new_commands_for_a_live_destination_are_refused(phase: str) -> None:
    scheduler = destination_in(phase).scheduler
    refuse(scheduler, ReserveDestination(H, request("new", [1])), match="handoff h is already a destination")
    refuse(scheduler, ReserveDestination(H, request("new", [1]), attempt=2), match="already a destination")
    refuse(scheduler, ReserveDestination(handoff("new"), request("h", [1])), match="request id h is already active")
    refuse(scheduler, Submit(request("h", [1])), match="already active")


@pytest.mark.parametrize("phase", ["waiting", "prefilling", "decoding", "preempted"])
def test_a_submitted_request_is_cancelled_once_wherever_it_is(phase: str) -> None:
    node = DestinationNode(6, limits=BatchLimits(8, 4))
    if phase == "preempted":
        node.serve("other", OTHER, 8)
    node.scheduler.apply(Submit(request("h", PROMPT, 8)))
    for _ in range({"waiting": 0, "prefilling": 1, "decoding": 2, "preempted": 4}[phase]):
        node.step()
    assert node.scheduler.metrics().preempted == (phase == "preempted")
    try_twice(node, CancelRequest(RequestId("h")), APPLIED, True, None)


def test_cancel_source_before_the_prefill_finishes() -> None:
    node = source_in("chunk")
    assert node.scheduler.apply(CancelSource(H)).retired == ("h",)
    assert node.run() == []
    assert node.scheduler.apply(CancelSource(H)).result == NOOP


def test_cancel_source_in_the_very_step_that_finishes_the_prefill() -> None:
    """While the step runs the command has to wait; at the boundary it strips what the step brought."""
    node = SourceNode()
    node.submit("h", PROMPT)
    plan = launch_step(node)
    refuse(node.scheduler, CancelSource(H), StepInFlight)
    node.settle(plan)
    effects = node.scheduler.apply(CancelSource(H))
    assert (effects.result, effects.retired, effects.suppressed_pending_output) == (APPLIED, ("h",), True)
    assert node.boundary().is_empty
    assert node.scheduler.is_drained


def test_release_source_before_it_is_held() -> None:
    node = source_in("chunk")
    assert node.scheduler.apply(ReleaseSource(H)).retired == ()
    boundaries = node.run()
    assert [boundary.events for boundary in boundaries] == [(), ()]
    assert boundaries[-1].retired == ("h",)
    assert node.tokens["h"] == expected_output(range(40), 1)


@pytest.mark.parametrize("first", [ReleaseSource(H), CancelSource(H)])
def test_release_source_twice_or_after_cancel(first: Command) -> None:
    scheduler = source_in("held").scheduler
    assert scheduler.apply(first).result == APPLIED
    assert scheduler.apply(ReleaseSource(H)).result == NOOP


def test_activate_before_the_reservation() -> None:
    node = destination_in("pending")
    assert node.scheduler.apply(ActivateDestination(H)).result == NOOP
    assert reserved_in(node.scheduler.apply(CancelDestination(handoff("other"))).events) == ["h"]
    # The early command is not remembered.
    node.land("h", PROMPT)
    assert phase_of(node.scheduler, "h") == "landed"


def test_activate_after_cancel_destination() -> None:
    for phase in ("pending", "reserved", "receiving", "landed", "armed", "ready", "running"):
        node = destination_in(phase)
        node.scheduler.apply(CancelDestination(H))
        assert node.scheduler.apply(ActivateDestination(H)).result == NOOP
        node.scheduler.transfer_quiet(H, 1)
        node.run()
        assert node.tokens.get("h", []) == (expected_output(PROMPT, 2)[1:] if phase == "running" else [])


def test_cancel_destination_of_the_pending_head() -> None:
    """The one behind it is tried in the same command."""
    node = DestinationNode(5)
    assert [node.reserve("other", OTHER), node.reserve("h", PROMPT), node.reserve("behind", [1])] == [["other"], [], []]
    effects = node.scheduler.apply(CancelDestination(H))
    assert effects.retired == ("h",)
    assert reserved_in(effects.events) == ["behind"]


def test_cancel_destination_after_the_natural_end() -> None:
    node = destination_in("ended")
    assert node.scheduler.apply(CancelDestination(H)).result == NOOP
    assert node.tokens["h"] == expected_output(PROMPT, 2)[1:]


def test_cancel_destination_after_activation_and_before_it_runs() -> None:
    node = destination_in("ready")
    assert node.scheduler.apply(CancelDestination(H)).retired == ("h",)
    assert node.run() == []
    assert node.plans == []


def test_a_request_id_whose_source_is_held_is_taken() -> None:
    node = source_in("held")
    refuse(node.scheduler, SubmitHandoffPrefill(handoff("again"), request("h", PROMPT)), match="already active")
    node.scheduler.apply(ReleaseSource(H))
    node.hold("h", PROMPT)


def test_a_prefill_that_is_impossible_is_refused_at_once() -> None:
    """The reference lets the next pass reject it and then drops the hold; here nothing is ever registered."""
    node = SourceNode(blocks=2)
    refuse(node.scheduler, SubmitHandoffPrefill(H, request("h", PROMPT)), match="need 3 KV blocks, the node has 2")
    refuse(node.scheduler, SubmitHandoffPrefill(H, request("h", range(257))), match="exceed the model's 256 positions")
    assert node.scheduler.apply(CancelSource(H)).result == NOOP
    assert node.run() == []
