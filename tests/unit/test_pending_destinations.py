"""Destinations that wait for blocks or for a place: strict order, one try per occasion, and who may pass meanwhile."""

import pytest
from handoff_drive import DestinationNode, SourceNode, phase_of, reserved_in, wind_down
from kv_machine import expected_output
from scheduler_drive import handoff, request

from scheduler.batching import BatchLimits
from scheduler.commands import ActivateDestination, CancelDestination, CancelRequest, ReleaseSource, Submit
from scheduler.events import DestinationFinished, DestinationReserved
from scheduler.ids import RequestId
from scheduler.policies import Preemption, SchedulingPolicy


def prompt(name: str, tokens: int = 10) -> list[int]:
    """A prompt that shares no block with another name's."""
    return [ord(name[0])] * tokens


def full(blocks: int = 4) -> DestinationNode:
    """A pool whose blocks belong to `first`, which is reserved and has no bytes yet."""
    node = DestinationNode(blocks)
    assert node.reserve("first", prompt("first", blocks * 4 - 1), 2) == ["first"]
    assert node.scheduler.kv.pool.available == 0
    return node


def test_an_accepted_destination_waits_for_blocks_in_fifo_order() -> None:
    node = full(6)
    for name in ("x", "y"):
        assert node.reserve(name, prompt(name)) == []
    assert node.scheduler.metrics().waiting == 3
    node.land("first", prompt("first", 23))
    node.scheduler.apply(ActivateDestination(handoff("first")))
    order = []
    for boundary in node.run():
        order += [type(event).__name__ + " " + event.handoff_id for event in boundary.events]
    assert order == ["DestinationFinished first", "DestinationReserved x", "DestinationReserved y"]


def test_a_small_one_does_not_overtake_the_blocked_head() -> None:
    node = DestinationNode(blocks=5)
    node.reserve("first", prompt("first"))
    assert node.reserve("large", prompt("large")) == []
    assert node.reserve("small", [1], 2) == []
    assert phase_of(node.scheduler, "small") == "pending"


def test_cancelling_the_blocked_head_retries_the_next_in_the_same_command() -> None:
    node = DestinationNode(blocks=5)
    node.reserve("first", prompt("first"))
    node.reserve("large", prompt("large"))
    node.reserve("small", [1], 2)
    effects = node.scheduler.apply(CancelDestination(handoff("large")))
    assert effects.retired == ("large",)
    assert reserved_in(effects.events) == ["small"]


def test_cancelling_one_behind_the_head_leaves_the_order_of_the_others() -> None:
    node = full(9)
    for name in ("x", "y", "z"):
        node.reserve(name, prompt(name))
    node.scheduler.apply(CancelDestination(handoff("y")))
    assert reserved_in(node.scheduler.apply(CancelDestination(handoff("first"))).events) == ["x"]
    assert reserved_in(node.boundary().events) == ["z"]
    assert phase_of(node.scheduler, "y") is None


@pytest.mark.parametrize("command", ["CancelDestination", "CancelRequest"])
def test_cancelling_what_runs_retries_the_head_at_once(command: str) -> None:
    node = DestinationNode(blocks=4)
    node.serve("first", prompt("first", 14), 3)
    node.step()
    assert node.reserve("x", prompt("x")) == []
    if command == "CancelDestination":
        effects = node.scheduler.apply(CancelDestination(handoff("first")))
    else:
        effects = node.scheduler.apply(CancelRequest(RequestId("first")))
    assert effects.retired == ("first",)
    assert reserved_in(effects.events) == ["x"]


def test_a_retry_reserves_the_head_at_most() -> None:
    node = full(9)
    for name in ("x", "y", "z"):
        node.reserve(name, prompt(name))
    assert reserved_in(node.scheduler.apply(CancelDestination(handoff("first"))).events) == ["x"]
    assert [reserved_in(node.boundary().events) for _ in range(3)] == [["y"], ["z"], []]


def test_a_noop_is_no_occasion_to_retry() -> None:
    node = full(9)
    for name in ("x", "y"):
        node.reserve(name, prompt(name))
    node.scheduler.apply(CancelDestination(handoff("first")))
    assert node.scheduler.apply(CancelDestination(handoff("unknown"))).events == ()
    assert phase_of(node.scheduler, "y") == "pending"


def test_the_head_is_not_probed_again_in_the_same_generation() -> None:
    node = full()
    node.reserve("x", prompt("x"))
    lookups = node.scheduler.metrics().lookups
    for _ in range(3):
        assert node.step() is None
    node.reserve("y", prompt("y"))
    assert node.scheduler.metrics().lookups == lookups
    # A block that comes back is a new generation: the head is looked up again, once.
    node.scheduler.apply(CancelDestination(handoff("first")))
    assert node.scheduler.metrics().lookups == lookups + 2


def test_what_waits_is_reserved_when_the_transport_is_quiet() -> None:
    node = full()
    node.reserve("x", prompt("x"))
    node.scheduler.transfer_started(handoff("first"), 1)
    assert node.scheduler.apply(CancelDestination(handoff("first"))).events == ()
    assert node.boundary().is_empty
    node.scheduler.transfer_quiet(handoff("first"), 1)
    boundary = node.boundary()
    assert boundary.retired == ("first",)
    assert reserved_in(boundary.events) == ["x"]


def test_while_a_destination_waits_no_fresh_request_is_admitted() -> None:
    node = DestinationNode(blocks=5)
    node.serve("first", prompt("first"))
    node.reserve("large", prompt("large"))
    node.scheduler.apply(Submit(request("local", [1], 1)))
    node.step()
    assert node.plans == ["decode first[10..10]"]
    node.scheduler.apply(CancelDestination(handoff("large")))
    node.step()
    assert node.plans[1:] == ["decode first[11..11], local[0..0]"]


def test_an_activated_request_runs_past_blocked_ones() -> None:
    node = DestinationNode(blocks=7)
    for name in ("first", "second"):
        node.serve(name, prompt(name))
    assert node.reserve("blocked", prompt("blocked")) == []
    node.scheduler.apply(Submit(request("local", [1], 1)))
    node.step()
    assert node.plans == ["decode first[10..10], second[10..10]"]


def test_a_blocked_node_does_not_spin() -> None:
    node = full()
    node.reserve("blocked", prompt("blocked"))
    node.scheduler.apply(Submit(request("local", [1], 1)))
    assert node.run() == []
    assert node.plans == []
    wind_down(node)


def test_handoffs_under_way_have_their_own_limit() -> None:
    node = DestinationNode(blocks=40, max_reservations=2)
    assert [node.reserve(name, prompt(name)) for name in ("x", "y", "z")] == [["x"], ["y"], []]
    node.land("x", prompt("x"))
    assert node.boundary().events == ()
    assert reserved_in(node.scheduler.apply(ActivateDestination(handoff("x"))).events) == ["z"]


def test_an_armed_landing_frees_its_place_for_the_next_boundary() -> None:
    node = DestinationNode(blocks=40, max_reservations=1)
    node.reserve("x", prompt("x"), armed=True)
    node.reserve("y", prompt("y"))
    node.land("x", prompt("x"))
    assert phase_of(node.scheduler, "y") == "pending"
    assert reserved_in(node.boundary().events) == ["y"]


def test_the_limit_counts_what_drains() -> None:
    node = DestinationNode(blocks=40, max_reservations=1)
    for name in ("x", "y"):
        node.reserve(name, prompt(name))
    node.scheduler.transfer_started(handoff("x"), 1)
    assert node.scheduler.apply(CancelDestination(handoff("x"))).events == ()
    assert node.boundary().events == ()
    node.scheduler.transfer_quiet(handoff("x"), 1)
    assert reserved_in(node.boundary().events) == ["y"]


def test_the_batch_size_does_not_limit_reservations() -> None:
    """The reference needs a free running slot to reserve; in-flight handoffs have a limit of their own here."""
    node = DestinationNode(blocks=40, limits=BatchLimits(4, 1))
    node.serve("first", prompt("first"))
    node.step()
    assert [node.reserve(name, prompt(name)) for name in ("x", "y")] == [["x"], ["y"]]


def test_admission_by_commitment_waits_for_the_whole_footprint() -> None:
    node = DestinationNode(blocks=7, policy=SchedulingPolicy(preemption=Preemption.NONE))
    # Each may grow to 10 + 5 tokens of which the last needs no place: 4 blocks.
    assert node.reserve("x", prompt("x"), 5) == ["x"]
    assert node.reserve("y", prompt("y"), 5) == []
    assert node.scheduler.metrics().reserved == 3
    node.land("x", prompt("x"))
    node.scheduler.apply(ActivateDestination(handoff("x")))
    finished = node.run()[-1]
    assert [type(event) for event in finished.events] == [DestinationFinished, DestinationReserved]
    assert reserved_in(finished.events) == ["y"]
    assert node.tokens["x"] == expected_output(prompt("x"), 5)[1:]


def test_a_promise_that_ends_is_a_new_generation_though_no_block_comes_back() -> None:
    """A source whose blocks live on in another's table gives back its promise only; that admits who waits for one."""
    node = SourceNode(blocks=8, policy=SchedulingPolicy(preemption=Preemption.NONE))
    node.hold("short", prompt("s", 12))
    node.hold("long", prompt("s", 16))
    node.scheduler.apply(Submit(request("local", [1, 2, 3, 4], 5)))
    assert node.run() == []
    available = node.scheduler.kv.pool.available
    node.scheduler.apply(ReleaseSource(handoff("short")))
    assert node.scheduler.kv.pool.available == available
    node.run()
    assert node.tokens["local"] == expected_output([1, 2, 3, 4], 5)
