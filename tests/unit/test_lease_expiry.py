"""Leases: what a handoff owns ends when nothing is heard of it. They measure lack of progress, not queueing."""

from math import inf

import pytest
from handoff_drive import DestinationNode, SourceNode, holding, phase_of, reserved_in
from kv_machine import expected_output
from scheduler_drive import Stepper, handoff, request

from scheduler.commands import (
    ActivateDestination,
    CancelDestination,
    CancelSource,
    Command,
    Noop,
    ReleaseSource,
    Submit,
)
from scheduler.errors import StepInFlight
from scheduler.events import BoundaryEffects, DestinationReserved, LeaseExpired, Side, SourceHeld
from scheduler.ids import RequestId
from scheduler.leases import Leases

H, A = handoff("h"), RequestId("h")
PROMPT = tuple(range(10))
LEASE_S = 30.0


def source() -> SourceNode:
    """Held; its lease ends at 31 s."""
    node = SourceNode(lease_s=LEASE_S)
    node.submit("h", PROMPT)
    node.step()
    assert node.now == 1.0
    node.scheduler.renew(H, 1)
    assert left(node) == LEASE_S
    return node


def destination(**options: int) -> DestinationNode:
    """Reserved at 0.0 s; its lease ends at 30."""
    node = DestinationNode(lease_s=LEASE_S, **options)
    assert node.reserve("h", PROMPT) == [H]
    assert left(node) == LEASE_S
    return node


def left(node: Stepper) -> float | None:
    found = holding(node.scheduler, "h")
    assert found is not None
    return found.lease_left_s


def at(node: Stepper, now: float) -> BoundaryEffects:
    node.now = now
    return node.boundary()


def test_a_held_source_expires() -> None:
    node = source()
    assert at(node, 30.9).is_empty
    boundary = at(node, 31.0)
    assert boundary.events == (LeaseExpired(H, 1, A, Side.SOURCE),)
    assert boundary.retired == ("h",)
    assert node.scheduler.is_drained
    assert node.scheduler.counters.expired_leases == 1
    # What was computed serves others.
    assert node.scheduler.metrics().cached == 3
    assert node.scheduler.apply(ReleaseSource(H)).result == Noop()


@pytest.mark.parametrize("phase", ["reserved", "landed"])
def test_a_destination_expires(phase: str) -> None:
    node = destination()
    if phase == "landed":
        node.land("h", PROMPT)
    assert at(node, 29.9).is_empty
    boundary = at(node, 30.0)
    assert boundary.events == (LeaseExpired(H, 1, A, Side.DESTINATION),)
    assert boundary.retired == ("h",)
    assert node.scheduler.is_drained
    # Bytes that nobody confirmed are no prefix cache.
    assert node.scheduler.metrics().free == 16
    assert node.scheduler.apply(ActivateDestination(H)).result == Noop()


def test_a_lease_expires_once() -> None:
    node = source()
    assert len(at(node, 40.0).events) == 1
    assert at(node, 80.0).is_empty
    assert node.scheduler.counters.expired_leases == 1


def test_a_pending_source_has_no_lease() -> None:
    """It waits for this node, which is busy; that is nobody's lack of progress."""
    node = SourceNode(blocks=4, lease_s=LEASE_S)
    node.hold("other", range(50, 65))
    node.submit("h", PROMPT)
    assert left(node) is None
    assert not node.scheduler.renew(H, 1)
    node.scheduler.renew(handoff("other"), 1)
    assert at(node, 1000.0).events == (LeaseExpired(handoff("other"), 1, RequestId("other"), Side.SOURCE),)
    node.run()
    assert phase_of(node.scheduler, "h") == "held"


def test_a_pending_destination_has_no_lease_until_it_is_reserved() -> None:
    node = DestinationNode(lease_s=LEASE_S, max_reservations=1)
    node.reserve("other", [1])
    node.reserve("h", PROMPT)
    at(node, 20.0)
    assert left(node) is None
    assert not node.scheduler.renew(H, 1)
    assert reserved_in(node.scheduler.apply(CancelDestination(handoff("other"))).events) == ["h"]
    assert left(node) == LEASE_S
    assert at(node, 49.9).is_empty
    assert len(at(node, 50.0).events) == 1


def test_an_active_destination_has_no_lease() -> None:
    node = destination()
    node.land("h", PROMPT)
    node.scheduler.apply(ActivateDestination(H))
    assert left(node) is None
    assert not node.scheduler.renew(H, 1)
    assert at(node, 1000.0).is_empty
    node.run()
    assert node.tokens["h"] == expected_output(PROMPT, 4)[1:]


def test_an_armed_landing_ends_the_lease() -> None:
    node = DestinationNode(lease_s=LEASE_S)
    node.reserve("h", PROMPT, armed=True)
    node.land("h", PROMPT)
    assert left(node) is None
    assert at(node, 1000.0).is_empty
    assert phase_of(node.scheduler, "h") == "active"


def test_renewal_starts_the_lease_anew() -> None:
    for node in (source(), destination()):
        at(node, 25.0)
        assert node.scheduler.renew(H, 1)
        assert left(node) == LEASE_S
        assert at(node, 54.9).is_empty
        assert len(at(node, 55.0).events) == 1


def test_renewal_of_what_is_not_there_says_so() -> None:
    for node in (source(), destination()):
        before = left(node)
        assert not node.scheduler.renew(H, 2)
        assert not node.scheduler.renew(handoff("unknown"), 1)
        assert left(node) == before
        at(node, 100.0)
        assert not node.scheduler.renew(H, 1)


def test_a_start_of_the_transfer_renews_the_sources_lease() -> None:
    node = source()
    at(node, 25.0)
    node.scheduler.transfer_started(H, 1)
    assert left(node) == LEASE_S


def test_landing_renews_the_destinations_lease() -> None:
    node = destination()
    at(node, 25.0)
    node.land("h", PROMPT)
    assert left(node) == LEASE_S


def test_an_expired_source_that_is_sent_drains() -> None:
    node = source()
    node.scheduler.transfer_started(H, 1)
    boundary = at(node, 31.0)
    assert boundary.events == (LeaseExpired(H, 1, A, Side.SOURCE),)
    assert boundary.retired == ()
    assert phase_of(node.scheduler, "h") == "draining"
    assert left(node) is None
    assert at(node, 500.0).is_empty
    node.scheduler.transfer_quiet(H, 1)
    assert node.boundary().retired == ("h",)
    assert node.scheduler.is_drained


def test_an_expired_destination_that_receives_drains() -> None:
    node = destination(blocks=4)
    node.scheduler.transfer_started(H, 1)
    boundary = at(node, 30.0)
    assert boundary.events == (LeaseExpired(H, 1, A, Side.DESTINATION),)
    assert boundary.retired == ()
    assert phase_of(node.scheduler, "h") == "draining"
    assert node.reserve("next", [7] * 10) == []
    # Bytes that land now are not wanted, but they are the last.
    assert not node.scheduler.landed(H, 1, first_token=5)
    boundary = at(node, 31.0)
    assert (boundary.retired, reserved_in(boundary.events)) == (("h",), ["next"])


def test_the_blocks_of_an_expired_destination_serve_the_next_at_the_same_boundary() -> None:
    node = destination(blocks=4)
    assert node.reserve("next", [7] * 10) == []
    boundary = at(node, 30.0)
    assert boundary.retired == ("h",)
    assert [type(event) for event in boundary.events] == [LeaseExpired, DestinationReserved]
    assert reserved_in(boundary.events) == ["next"]
    found = holding(node.scheduler, "next")
    assert found is not None
    assert (found.phase_age_s, found.lease_left_s) == (0.0, LEASE_S)


@pytest.mark.parametrize("command", [ReleaseSource(H), CancelSource(H)])
def test_the_end_of_a_source_ends_its_lease(command: Command) -> None:
    node = source()
    node.scheduler.apply(command)
    assert at(node, 1000.0).is_empty
    assert node.scheduler.next_deadline == inf


def test_a_new_handoff_of_the_same_name_has_its_own_lease() -> None:
    node = destination()
    at(node, 20.0)
    node.scheduler.apply(CancelDestination(H))
    node.reserve("h", PROMPT)
    assert at(node, 49.9).is_empty
    assert len(at(node, 50.0).events) == 1


def test_several_leases_expire_in_the_order_of_their_deadlines() -> None:
    node = DestinationNode(lease_s=LEASE_S)
    for now, name in ((0.0, "c"), (1.0, "a"), (2.0, "b")):
        at(node, now)
        node.reserve(name, [ord(name)])
    node.scheduler.renew(handoff("c"), 1)
    boundary = at(node, 40.0)
    assert [event.handoff_id for event in boundary.events] == ["a", "c", "b"]
    assert boundary.retired == ("a", "c", "b")


def test_next_deadline_is_when_the_boundary_has_something_to_do() -> None:
    node = DestinationNode(lease_s=LEASE_S)
    assert node.scheduler.next_deadline == inf
    node.reserve("a", [1])
    assert node.scheduler.next_deadline == 30.0
    at(node, 10.0)
    node.reserve("b", [2])
    assert node.scheduler.next_deadline == 30.0
    assert [event.handoff_id for event in at(node, 30.0).events] == ["a"]
    assert node.scheduler.next_deadline == 40.0
    assert [event.handoff_id for event in at(node, 40.0).events] == ["b"]
    assert node.scheduler.next_deadline == inf


def test_a_deadline_that_was_put_off_wakes_once_in_vain() -> None:
    """Renewals are many and deadlines few: `next_deadline` may be early, never late, and is right after a boundary."""
    node = destination()
    at(node, 10.0)
    node.scheduler.renew(H, 1)
    assert node.scheduler.next_deadline <= 40.0
    assert at(node, 30.0).is_empty
    assert node.scheduler.next_deadline == 40.0


def test_time_does_not_go_back() -> None:
    node = destination()
    at(node, 20.0)
    assert at(node, 5.0).is_empty
    assert node.scheduler.now == 20.0
    assert left(node) == 10.0


def test_leases_are_infinite_unless_told() -> None:
    for node in (SourceNode(), DestinationNode()):
        if isinstance(node, SourceNode):
            node.hold("h", PROMPT)
        else:
            node.reserve("h", PROMPT)
        assert left(node) == inf
        assert node.scheduler.next_deadline == inf
        assert at(node, 1e12).is_empty
        assert node.scheduler.renew(H, 1)


def test_leases_expire_between_steps_only() -> None:
    node = source()
    node.scheduler.apply(Submit(request("local", [7] * 5)))
    plan = node.launch()
    assert plan is not None
    with pytest.raises(StepInFlight):
        node.scheduler.boundary(100.0)
    assert phase_of(node.scheduler, "h") == "held"
    node.settle(plan)
    boundary = at(node, 100.0)
    # What the step brought is told before what the clock did.
    assert [output.request_id for output in boundary.outputs] == ["local"]
    assert boundary.events == (LeaseExpired(H, 1, A, Side.SOURCE),)


def test_a_hold_has_its_whole_lease_when_it_is_told() -> None:
    """However long the step took: nobody can renew what nobody has heard of."""
    node = SourceNode(lease_s=0.5)
    node.submit("h", PROMPT)
    done = node.step()
    assert done is not None
    assert done.events == (SourceHeld(H, 1, A, prompt_tokens=10, cached_tokens=0),)
    assert left(node) == 0.5


@pytest.mark.parametrize("duration", [0.0, -1.0])
def test_a_lease_must_last(duration: float) -> None:
    with pytest.raises(ValueError, match="lasts longer than 0 s"):
        Leases(duration)


def test_the_story_tells_of_the_expiry() -> None:
    node = destination()
    at(node, 30.0)
    assert [line.what for line in node.scheduler.story(A)][-1] == "lease of 30 s expired while reserved"
