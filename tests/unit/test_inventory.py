"""The inventory: what a coordinator that has lost its memory is told of each hold, reservation and active handoff."""

from math import inf

from handoff_drive import DestinationNode, SourceNode, holding, launch_step, settle_step
from scheduler_drive import handoff, request

from scheduler.commands import (
    ActivateDestination,
    CancelDestination,
    CancelRequest,
    CancelSource,
    ReleaseSource,
    ReserveDestination,
    Submit,
    SubmitHandoffPrefill,
)
from scheduler.events import Side
from scheduler.ids import HandoffId, RequestId
from scheduler.inventory import Holding, Inventory
from scheduler.policies import Preemption, SchedulingPolicy

PROMPT = tuple(range(10))
OTHER = tuple(range(50, 60))


def test_an_idle_node_owns_nothing() -> None:
    assert SourceNode(incarnation=3).scheduler.inventory() == Inventory(3, (), ())
    assert DestinationNode(incarnation=4).scheduler.inventory() == Inventory(4, (), ())


def test_every_phase_of_a_source() -> None:
    node = SourceNode(32, lease_s=30.0, max_handoffs=3)
    for name in ("held", "draining"):
        node.hold(name, [ord(name[0])] * 10)
    assert node.now == 2.0
    node.scheduler.transfer_started(handoff("draining"), 1)
    node.now = 5.0
    node.boundary()
    node.scheduler.apply(ReleaseSource(handoff("draining")))
    node.scheduler.renew(handoff("held"), 1)
    node.submit("pending", range(40))
    node.submit("queued", PROMPT)
    node.now = 7.0
    node.step()
    assert node.now == 8.0
    found = {item.handoff_id: item for item in node.scheduler.inventory().holdings}
    assert list(found) == ["held", "draining", "pending", "queued"]
    assert found[handoff("held")] == Holding(
        handoff_id=handoff("held"),
        attempt=1,
        request_id=RequestId("held"),
        side=Side.SOURCE,
        phase="held",
        blocks=3,
        outputs=1,
        age_s=8.0,
        # The node's clock stands still while a step runs: the hold is as old as that step's boundary.
        phase_age_s=7.0,
        lease_left_s=27.0,
    )
    draining = found[handoff("draining")]
    assert (draining.phase, draining.blocks, draining.outputs) == ("draining", 3, 1)
    assert (draining.age_s, draining.phase_age_s, draining.lease_left_s) == (7.0, 3.0, None)
    pending = found[handoff("pending")]
    assert (pending.phase, pending.blocks, pending.outputs) == ("pending", 10, 0)
    assert (pending.age_s, pending.phase_age_s, pending.lease_left_s) == (3.0, 3.0, None)
    queued = found[handoff("queued")]
    assert (queued.phase, queued.blocks, queued.outputs, queued.lease_left_s) == ("pending", 0, 0, None)


def test_a_hold_has_an_age_of_its_own() -> None:
    """Its third chunk ran in the step of 2.0 s."""
    node = SourceNode()
    node.submit("h", range(40))
    assert len(node.run()) == 3
    node.now = 10.0
    node.boundary()
    item = holding(node.scheduler, "h")
    assert item is not None
    assert (item.phase, item.age_s, item.phase_age_s) == ("held", 10.0, 7.0)


def test_every_phase_of_a_destination() -> None:
    node = DestinationNode(17, lease_s=30.0)
    # One of three full blocks in each of five phases, and one that finds no room.
    for name in ("reserved", "landed", "draining", "active", "running"):
        node.reserve(name, [ord(name[0]), ord(name[1])] * 5, 3)
    node.reserve("pending", PROMPT, 3)
    node.now = 4.0
    node.boundary()
    for name in ("landed", "active", "running"):
        node.land(name, [ord(name[0]), ord(name[1])] * 5)
    node.scheduler.apply(ActivateDestination(handoff("running")))
    node.step()
    assert node.now == 5.0
    node.scheduler.apply(ActivateDestination(handoff("active")))
    node.scheduler.transfer_started(handoff("draining"), 1)
    node.scheduler.apply(CancelDestination(handoff("draining")))
    node.now = 9.0
    node.boundary()
    inventory = node.scheduler.inventory()
    rows = [
        (item.handoff_id, item.phase, item.blocks, item.outputs, item.age_s, item.phase_age_s, item.lease_left_s)
        for item in inventory.holdings
    ]
    assert rows == [
        ("reserved", "reserved", 3, 0, 9.0, 9.0, 21.0),
        ("landed", "landed", 3, 1, 9.0, 5.0, 25.0),
        ("draining", "draining", 3, 0, 9.0, 4.0, None),
        ("active", "active", 3, 1, 9.0, 4.0, None),
        ("running", "active", 3, 2, 9.0, 5.0, None),
        ("pending", "pending", 0, 0, 9.0, 9.0, None),
    ]
    assert {item.side for item in inventory.holdings} == {Side.DESTINATION}
    assert inventory.local == ()


def test_what_is_gone_is_gone() -> None:
    node = SourceNode()
    node.hold("h", PROMPT)
    node.scheduler.apply(CancelSource(handoff("h")))
    assert node.scheduler.inventory() == Inventory(1, (), ())
    other = DestinationNode()
    other.serve("h", PROMPT)
    other.run()
    assert other.scheduler.inventory() == Inventory(1, (), ())


def test_attempts_and_names_are_the_senders() -> None:
    node = SourceNode()
    node.scheduler.apply(SubmitHandoffPrefill(HandoffId("h7"), request("r3", PROMPT), attempt=4))
    (item,) = node.scheduler.inventory().holdings
    assert (item.handoff_id, item.attempt, item.request_id) == ("h7", 4, "r3")
    other = DestinationNode()
    other.scheduler.apply(ReserveDestination(HandoffId("h7"), request("r3", PROMPT), attempt=5))
    (item,) = other.scheduler.inventory().holdings
    assert (item.handoff_id, item.attempt, item.request_id) == ("h7", 5, "r3")


def test_local_requests_are_listed_apart() -> None:
    node = DestinationNode(24)
    node.serve("h", PROMPT)
    for name in ("x", "y"):
        node.scheduler.apply(Submit(request(name, [ord(name)] * 5)))
    assert node.scheduler.inventory().local == ("x", "y")
    assert [item.handoff_id for item in node.scheduler.inventory().holdings] == ["h"]
    node.scheduler.apply(CancelRequest(RequestId("x")))
    assert node.scheduler.inventory().local == ("y",)


def test_a_source_that_was_released_early_is_local_until_it_ends() -> None:
    node = SourceNode()
    node.submit("h", range(40))
    node.scheduler.apply(ReleaseSource(handoff("h")))
    assert node.scheduler.inventory() == Inventory(1, (), (RequestId("h"),))
    node.run()
    assert node.scheduler.inventory() == Inventory(1, (), ())


def test_a_preempted_destination_is_active_without_blocks() -> None:
    for preemption in (Preemption.RECOMPUTE, Preemption.SPILL):
        node = DestinationNode(6, policy=SchedulingPolicy(preemption=preemption))
        node.serve("other", OTHER, 8)
        node.serve("h", PROMPT, 8)
        for _ in range(3):
            node.step()
        item = holding(node.scheduler, "h")
        assert item is not None
        assert (item.phase, item.blocks, item.outputs, item.phase_age_s) == ("active", 0, 3, 3.0)


def test_it_is_answered_at_any_moment() -> None:
    """While a step runs it is the state before it; a doomed request is gone from it at once."""
    node = DestinationNode()
    node.serve("h", PROMPT)
    node.serve("other", OTHER)
    plan = launch_step(node)
    assert [(item.handoff_id, item.outputs) for item in node.scheduler.inventory().holdings] == [("h", 1), ("other", 1)]
    node.scheduler.apply(CancelRequest(RequestId("h")))
    assert [item.handoff_id for item in node.scheduler.inventory().holdings] == ["other"]
    node.settle(plan)
    assert [(item.handoff_id, item.outputs) for item in node.scheduler.inventory().holdings] == [("other", 2)]


def test_a_hold_is_in_it_before_it_is_told() -> None:
    """A coordinator that asks between settlement and boundary must not take the KV for lost."""
    node = SourceNode()
    node.submit("h", PROMPT)
    settle_step(node)
    item = holding(node.scheduler, "h")
    assert item is not None
    assert (item.phase, item.lease_left_s) == ("held", inf)


def test_the_order_is_that_of_the_commands() -> None:
    node = DestinationNode(40)
    for name in ("c", "a", "b"):
        node.reserve(name, [ord(name)])
    node.land("a", [ord("a")])
    node.scheduler.apply(ActivateDestination(handoff("a")))
    assert [item.handoff_id for item in node.scheduler.inventory().holdings] == ["c", "a", "b"]
