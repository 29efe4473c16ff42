"""Every state that the coordinator can be in, with every event: nothing is asked for twice, nothing is forgotten."""

from collections.abc import Iterator
from functools import cache
from typing import TypeAlias

import pytest

from handoff.coordinator import (
    Acknowledged,
    Action,
    ActionKind,
    Cancelled,
    Completion,
    DestinationFailed,
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
Transition: TypeAlias = tuple[Handoff, Event, Handoff, tuple[Action, ...]]
"""before, event, after, actions"""
Key: TypeAlias = tuple[Phase, tuple[Action, ...], frozenset[tuple[int, Outcome]], Completion | None, bool]
FACTS: tuple[Event, ...] = (
    Start(),
    SourceIsHeld(),
    SourceHasFinished(),
    DestinationIsReserved(),
    TransferLanded(),
    DestinationFailed("no destination"),
    Failed("failed"),
    Cancelled(),
)
USUAL = {
    K.SUBMIT_PREFILL: Outcome.SUBMITTED,
    K.RESERVE_DESTINATION: Outcome.ACCEPTED,
    K.START_TRANSFER: Outcome.SCHEDULED,
}
FOLLOWERS = {K.CANCEL_SOURCE: K.SUBMIT_PREFILL, K.CANCEL_DESTINATION: K.RESERVE_DESTINATION}
ORDERS = pytest.mark.parametrize("order", list(Order), ids=lambda order: order.value)


def key_of(handoff: Handoff) -> Key:
    return handoff.phase, handoff.issued, frozenset(handoff.acknowledged.items()), handoff.completion, handoff.is_held


def events_of(handoff: Handoff, *, usual: bool) -> Iterator[Event]:
    """usual: only what a node would say of each action, or no answer."""
    yield from FACTS
    if usual:
        for action in handoff.issued:
            for outcome in (USUAL.get(action.kind, Outcome.APPLIED), Outcome.FAILED):
                yield Acknowledged(action.action_id, outcome, "why")
        return
    for action_id in range(len(handoff.issued) + 2):
        for outcome in Outcome:
            yield Acknowledged(action_id, outcome, "why")


def try_advance(handoff: Handoff, event: Event) -> tuple[Handoff, tuple[Action, ...]] | None:
    try:
        return advance(handoff, event)
    except UnexpectedEvent:
        return None


@cache
def transitions(order: Order, redirects: int = 0) -> list[Transition]:
    """Every accepted event in every reachable state."""
    found: list[Transition] = []
    start = Handoff(HandoffId("h"), order, redirects_left=redirects)
    seen = {key_of(start)}
    frontier = [start]
    while frontier:
        handoff = frontier.pop()
        for event in events_of(handoff, usual=redirects > 0):
            step = try_advance(handoff, event)
            if step is None:
                continue
            found.append((handoff, event, *step))
            if key_of(step[0]) not in seen:
                seen.add(key_of(step[0]))
                frontier.append(step[0])
    return found


@cache
def states(order: Order, redirects: int = 0) -> list[Handoff]:
    found = {key_of(after): after for _, _, after, _ in transitions(order, redirects)}
    return list(found.values())


@ORDERS
def test_actions_are_numbered_and_each_is_asked_for_once(order: Order) -> None:
    count = 0
    for before, _, after, actions in transitions(order):
        count += 1
        assert after.issued == before.issued + actions
        assert [a.action_id for a in after.issued] == list(range(1, len(after.issued) + 1))
        assert len({a.kind for a in after.issued}) == len(after.issued)
    assert count > 1000


@ORDERS
def test_an_event_that_is_accepted_is_harmless_when_it_comes_again(order: Order) -> None:
    for _, event, after, _ in transitions(order):
        again, actions = advance(after, event)
        assert (key_of(again), actions) == (key_of(after), ()), event


@ORDERS
def test_the_source_is_released_only_after_the_activation_was_applied(order: Order) -> None:
    for state in states(order):
        if state.has_issued(K.RELEASE_SOURCE):
            assert state.outcome_of(K.ACTIVATE_DESTINATION) is Outcome.APPLIED
        if state.has_issued(K.ACTIVATE_DESTINATION):
            assert state.outcome_of(K.SUBMIT_PREFILL) is Outcome.SUBMITTED
            assert order is Order.DESTINATION_FIRST or state.outcome_of(K.START_TRANSFER) is Outcome.SCHEDULED


@ORDERS
def test_giving_up_addresses_every_side_that_was_ever_told_anything(order: Order) -> None:
    for before, event, after, actions in transitions(order):
        gave_up = after.completion in (Completion.CANCELLED, Completion.FAILED) and before.completion is None
        issued = {action.kind for action in actions}
        if gave_up:
            assert issued == {cleanup for cleanup, told in FOLLOWERS.items() if before.has_issued(told)}, event
        elif before.completion is Completion.HANDED_OVER and after.completion is Completion.CANCELLED:
            assert issued == {K.CANCEL_DESTINATION}
        elif after.completion is Completion.FINISHED_AT_SOURCE and before.completion is None:
            assert issued == ({K.CANCEL_DESTINATION} if before.has_issued(K.RESERVE_DESTINATION) else set())
        else:
            assert not issued & FOLLOWERS.keys()


@ORDERS
@pytest.mark.parametrize("redirects", [0, 1])
def test_the_end_is_reached_when_every_action_is_acknowledged(order: Order, redirects: int) -> None:
    for state in states(order, redirects):
        for outcome in Outcome:
            stopped, _ = advance(state, Cancelled())
            for action in stopped.issued:
                if action.action_id not in stopped.acknowledged:
                    stopped, more = advance(stopped, Acknowledged(action.action_id, outcome, "why"))
                    assert more == ()
            assert stopped.phase is Phase.DONE


@ORDERS
def test_the_end_means_something(order: Order) -> None:
    for state in states(order):
        assert (state.completion is not None) == (state.phase in (Phase.DONE, Phase.CLEANING_UP))
        if state.completion is Completion.HANDED_OVER:
            assert state.phase is Phase.DONE
            assert state.outcome_of(K.ACTIVATE_DESTINATION) is Outcome.APPLIED
            released = state.outcome_of(K.RELEASE_SOURCE)
            assert released is not None
            assert (state.reason == "") == (released in (Outcome.APPLIED, Outcome.NOOP))
        if state.completion is Completion.FAILED:
            assert state.reason
        if state.phase is Phase.DONE:
            cleanups = [action for action in state.issued if action.kind in FOLLOWERS]
            assert all(action.action_id in state.acknowledged for action in cleanups)


@ORDERS
def test_after_the_end_nothing_but_a_cancel_of_a_decode_does_anything(order: Order) -> None:
    for before, event, after, actions in transitions(order):
        if before.phase is not Phase.DONE:
            continue
        if before.completion is Completion.HANDED_OVER and isinstance(event, Cancelled):
            assert after.phase is Phase.CLEANING_UP
        else:
            assert (after.phase, after.completion, actions) == (before.phase, before.completion, ()), event


def last(state: Handoff, kind: ActionKind) -> int:
    return max((action.action_id for action in state.issued if action.kind is kind), default=0)


@ORDERS
def test_a_source_is_submitted_once_and_released_for_the_destination_that_runs(order: Order) -> None:
    redirected = 0
    for state in states(order, 1):
        assert [a.kind for a in state.issued].count(K.SUBMIT_PREFILL) <= 1
        redirected += state.phase is Phase.REDIRECTING
        if state.phase is Phase.RELEASING or state.completion is Completion.HANDED_OVER:
            assert state.outcome_of(K.ACTIVATE_DESTINATION) is Outcome.APPLIED
            assert last(state, K.ACTIVATE_DESTINATION) > last(state, K.CANCEL_DESTINATION)
    assert redirected


@ORDERS
def test_no_second_destination_is_asked_before_the_first_was_told(order: Order) -> None:
    for before, event, _, actions in transitions(order, 1):
        if any(action.kind is K.RESERVE_DESTINATION for action in actions) and before.has_issued(K.CANCEL_DESTINATION):
            assert before.outcome_of(K.CANCEL_DESTINATION) is not None or isinstance(event, Acknowledged)


@ORDERS
def test_giving_up_after_a_redirect_addresses_what_may_own_something(order: Order) -> None:
    for before, _, after, actions in transitions(order, 1):
        if after.completion in (Completion.CANCELLED, Completion.FAILED) and before.completion is None:
            kinds = {action.kind for action in actions}
            owning = last(before, K.RESERVE_DESTINATION) > last(before, K.CANCEL_DESTINATION)
            assert (K.CANCEL_DESTINATION in kinds) == owning
            assert (K.CANCEL_SOURCE in kinds) == before.has_issued(K.SUBMIT_PREFILL)
