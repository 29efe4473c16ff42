import pytest

from handoff.coordinator import (
    Acknowledged,
    ActionKind,
    Cancelled,
    Completion,
    DestinationIsReserved,
    Event,
    Failed,
    Handoff,
    Order,
    Outcome,
    Phase,
    SourceHasFinished,
    SourceIsHeld,
    Start,
    TransferLanded,
    UnexpectedEvent,
    advance,
)
from scheduler.ids import HandoffId

K = ActionKind
EXPECTED = {
    K.RESERVE_DESTINATION: Outcome.ACCEPTED,
    K.SUBMIT_PREFILL: Outcome.SUBMITTED,
    K.START_TRANSFER: Outcome.SCHEDULED,
}
FACTS: dict[Order, tuple[Event, ...]] = {
    Order.DESTINATION_FIRST: (DestinationIsReserved(), SourceIsHeld(), TransferLanded()),
    Order.SOURCE_FIRST: (SourceIsHeld(), DestinationIsReserved(), TransferLanded()),
}
ORDERS = pytest.mark.parametrize("order", list(Order), ids=lambda order: order.value)


class Run:
    """A handoff and the kinds of actions that it asked for, in order."""

    def __init__(self, order: Order = Order.DESTINATION_FIRST) -> None:
        self.handoff = Handoff(HandoffId("h"), order)
        self.kinds: list[ActionKind] = []

    def feed(self, *events: Event) -> "Run":
        for event in events:
            self.handoff, actions = advance(self.handoff, event)
            self.kinds += [action.kind for action in actions]
        return self

    def acknowledge(self, kind: ActionKind, outcome: Outcome | None = None, reason: str = "") -> "Run":
        action = next(a for a in self.handoff.issued if a.kind is kind)
        return self.feed(Acknowledged(action.action_id, outcome or EXPECTED.get(kind, Outcome.APPLIED), reason))

    def until(self, phase: Phase) -> "Run":
        """The shortest way to a phase, everything acknowledged that came before it."""
        self.feed(Start())
        for fact in FACTS[self.handoff.order]:
            if self.handoff.phase is phase:
                return self
            self.acknowledge(self.kinds[-1]).feed(fact)
        while self.handoff.phase is not phase:
            self.acknowledge(self.kinds[-1])
        return self


@pytest.mark.parametrize(
    ("order", "start"),
    [
        (Order.DESTINATION_FIRST, [K.RESERVE_DESTINATION, K.SUBMIT_PREFILL]),
        (Order.SOURCE_FIRST, [K.SUBMIT_PREFILL, K.RESERVE_DESTINATION, K.START_TRANSFER]),
    ],
)
def test_both_orders_reach_the_same_safe_end(order: Order, start: list[ActionKind]) -> None:
    run = Run(order).until(Phase.DONE)
    assert run.kinds == [*start, K.ACTIVATE_DESTINATION, K.RELEASE_SOURCE]
    assert run.handoff.completion is Completion.HANDED_OVER
    assert [action.action_id for action in run.handoff.issued] == list(range(1, len(run.kinds) + 1))


def test_what_has_landed_was_held_even_if_the_source_says_so_later() -> None:
    run = Run().until(Phase.PREFILLING).acknowledge(K.SUBMIT_PREFILL).feed(TransferLanded())
    assert run.handoff.phase is Phase.ACTIVATING
    assert run.feed(SourceIsHeld()).handoff.phase is Phase.ACTIVATING


@ORDERS
def test_the_release_waits_for_the_activation_to_be_applied(order: Order) -> None:
    run = Run(order).until(Phase.ACTIVATING)
    assert K.RELEASE_SOURCE not in run.kinds
    run.acknowledge(K.ACTIVATE_DESTINATION)
    assert run.kinds[-1] is K.RELEASE_SOURCE


def test_an_activation_that_did_nothing_is_a_failure() -> None:
    run = Run().until(Phase.ACTIVATING).acknowledge(K.ACTIVATE_DESTINATION, Outcome.NOOP)
    assert run.kinds[-2:] == [K.CANCEL_SOURCE, K.CANCEL_DESTINATION]
    assert run.handoff.completion is Completion.FAILED


def test_a_release_of_nothing_is_fine() -> None:
    run = Run().until(Phase.RELEASING).acknowledge(K.RELEASE_SOURCE, Outcome.NOOP)
    assert run.handoff.completion is Completion.HANDED_OVER


@pytest.mark.parametrize(
    ("order", "cleanups"),
    [(Order.DESTINATION_FIRST, [K.CANCEL_DESTINATION]), (Order.SOURCE_FIRST, [])],
)
def test_a_request_that_ends_at_the_source_is_not_handed_over(order: Order, cleanups: list[ActionKind]) -> None:
    run = Run(order).until(Phase.PREFILLING).acknowledge(K.SUBMIT_PREFILL).feed(SourceHasFinished())
    assert run.kinds[run.kinds.index(K.SUBMIT_PREFILL) + 1 :] == cleanups
    for kind in cleanups:
        run.acknowledge(kind)
    assert (run.handoff.phase, run.handoff.completion) == (Phase.DONE, Completion.FINISHED_AT_SOURCE)


def test_a_cancel_before_anything_was_issued_is_over_at_once() -> None:
    run = Run().feed(Cancelled(), Start())
    assert (run.kinds, run.handoff.phase, run.handoff.completion) == ([], Phase.DONE, Completion.CANCELLED)


def test_a_failure_before_the_first_acknowledgement_cleans_the_issued_side_only() -> None:
    assert Run(Order.SOURCE_FIRST).feed(Start(), Failed("late")).kinds[1:] == [K.CANCEL_SOURCE]
    assert Run(Order.DESTINATION_FIRST).feed(Start(), Failed("late")).kinds[1:] == [K.CANCEL_DESTINATION]


@ORDERS
@pytest.mark.parametrize("phase", [Phase.TRANSFERRING, Phase.ACTIVATING, Phase.RELEASING])
def test_a_cancel_cleans_both_sides(order: Order, phase: Phase) -> None:
    run = Run(order).until(phase).feed(Cancelled())
    assert run.kinds[-2:] == [K.CANCEL_SOURCE, K.CANCEL_DESTINATION]
    assert run.acknowledge(K.CANCEL_SOURCE).handoff.phase is Phase.CLEANING_UP
    run.acknowledge(K.CANCEL_DESTINATION, Outcome.NOOP)
    assert (run.handoff.phase, run.handoff.completion) == (Phase.DONE, Completion.CANCELLED)


def test_a_lost_activation_is_cleaned_up_on_both_sides() -> None:
    run = Run().until(Phase.ACTIVATING).acknowledge(K.ACTIVATE_DESTINATION, Outcome.FAILED, "not within 1 s")
    assert run.kinds[-2:] == [K.CANCEL_SOURCE, K.CANCEL_DESTINATION]
    assert run.handoff.reason == "activate_destination: not within 1 s"


def test_a_lost_release_does_not_undo_the_decode() -> None:
    run = Run().until(Phase.RELEASING).feed(Failed("the source was lost"))
    assert run.handoff.phase is Phase.RELEASING
    run.acknowledge(K.RELEASE_SOURCE, Outcome.FAILED, "not within 1 s")
    assert run.kinds[-1] is K.RELEASE_SOURCE
    assert (run.handoff.phase, run.handoff.completion) == (Phase.DONE, Completion.HANDED_OVER)
    assert run.handoff.reason == "release_source: not within 1 s"


def test_a_cancel_after_success_stops_the_decode_and_nothing_else() -> None:
    run = Run().until(Phase.DONE).feed(Cancelled())
    assert run.kinds[4:] == [K.CANCEL_DESTINATION]
    run.acknowledge(K.CANCEL_DESTINATION)
    assert run.handoff.completion is Completion.CANCELLED
    assert run.feed(Cancelled()).kinds[5:] == []


def test_a_failure_after_success_changes_nothing() -> None:
    done = Run().until(Phase.DONE).handoff
    assert advance(done, Failed("late")) == (done, ())


def test_a_late_acknowledgement_is_absorbed_by_the_cleanup() -> None:
    run = Run().until(Phase.PREFILLING).feed(Cancelled())
    before = list(run.kinds)
    run.acknowledge(K.SUBMIT_PREFILL)
    assert run.kinds == before
    assert run.handoff.phase is Phase.CLEANING_UP


def test_a_cleanup_that_failed_is_told_after_the_first_reason() -> None:
    run = Run().until(Phase.TRANSFERRING).feed(Failed("d was lost"))
    run.acknowledge(K.CANCEL_SOURCE).acknowledge(K.CANCEL_DESTINATION, Outcome.FAILED, "unreachable")
    assert run.handoff.phase is Phase.DONE
    assert run.handoff.reason == "d was lost; cancel_destination: unreachable"


@pytest.mark.parametrize(
    ("order", "phase", "event"),
    [
        (Order.DESTINATION_FIRST, Phase.RESERVING, DestinationIsReserved()),
        (Order.DESTINATION_FIRST, Phase.PREFILLING, SourceIsHeld()),
        (Order.DESTINATION_FIRST, Phase.RESERVING, SourceIsHeld()),
        (Order.DESTINATION_FIRST, Phase.PREFILLING, TransferLanded()),
        (Order.DESTINATION_FIRST, Phase.TRANSFERRING, SourceHasFinished()),
        (Order.DESTINATION_FIRST, Phase.RESERVING, Acknowledged(9, Outcome.APPLIED)),
        (Order.SOURCE_FIRST, Phase.PREFILLING, TransferLanded()),
        (Order.SOURCE_FIRST, Phase.TRANSFERRING, TransferLanded()),
    ],
)
def test_what_cannot_be_true_yet_is_unexpected(order: Order, phase: Phase, event: Event) -> None:
    handoff = Run(order).until(phase).handoff
    with pytest.raises(UnexpectedEvent, match=f"handoff h: .* while {phase.value}") as caught:
        advance(handoff, event)
    assert (caught.value.handoff, caught.value.event) == (handoff, event)


def test_two_different_outcomes_of_one_action_are_unexpected() -> None:
    run = Run().until(Phase.PREFILLING)
    with pytest.raises(UnexpectedEvent):
        run.acknowledge(K.RESERVE_DESTINATION, Outcome.FAILED)


@ORDERS
def test_facts_that_come_twice_change_nothing(order: Order) -> None:
    run = Run(order).feed(Start(), Start())
    for fact in FACTS[order]:
        run.acknowledge(run.kinds[-1]).feed(fact, fact)
    run.feed(*FACTS[order])
    assert len(run.kinds) == len(set(run.kinds)) == (3 if order is Order.DESTINATION_FIRST else 4)
