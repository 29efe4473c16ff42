"""One handoff as a pure state machine: facts and outcomes in, actions out.

    destination_first  RESERVING --> PREFILLING --> TRANSFERRING --> ACTIVATING --> RELEASING --> DONE
    source_first       PREFILLING --> RESERVING --> TRANSFERRING --> ...

                       PREFILLING --first token ended the request--> CLEANING_UP --> DONE
    RESERVING .. ACTIVATING --destination failed--> REDIRECTING --cancelled there--> RESERVING, of another one
                                                               `--not held yet--> PREFILLING, source first
    any of them        --failed, timed out, cancelled--> CLEANING_UP --> DONE
    DONE (success)     --cancelled while the destination decodes--> CLEANING_UP --> DONE

With the destination first, the prefill is submitted with its destination: the source starts the transfer by itself in
the boundary in which it is held, so no round trip lies between the first token and the bytes. With the source first,
StartTransfer is a command.

A destination that fails before it runs costs no prefill: the source is kept, and another destination reserved, as often
as `redirects_left` says. From then on the handoff goes on with the source first.

Rules that must stay true:
- The source is released strictly after the activation was acknowledged as applied.
- The acknowledged activation is the commit point: what happens to the source afterwards can't undo the decode.
- Cleanup cancels every side that was ever issued a command, acknowledged or not: a lost acknowledgement may have been
  applied. Cancelling what isn't there is a no-op.
- Facts may come twice or late, and change nothing then. A fact that can't be true is UnexpectedEvent.

No clock, socket or actor is reachable from here. Source: the coordinator of the project's handoff reference.
"""

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeAlias

from scheduler.ids import HandoffId


class Order(Enum):
    DESTINATION_FIRST = "destination_first"
    SOURCE_FIRST = "source_first"


class Phase(Enum):
    NEW = "new"
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    REDIRECTING = "redirecting"
    TRANSFERRING = "transferring"
    ACTIVATING = "activating"
    RELEASING = "releasing"
    CLEANING_UP = "cleaning_up"
    DONE = "done"


class Completion(Enum):
    HANDED_OVER = "handed_over"
    FINISHED_AT_SOURCE = "finished_at_source"
    CANCELLED = "cancelled"
    FAILED = "failed"


class ActionKind(Enum):
    RESERVE_DESTINATION = "reserve_destination"
    SUBMIT_PREFILL = "submit_prefill"
    START_TRANSFER = "start_transfer"
    ACTIVATE_DESTINATION = "activate_destination"
    RELEASE_SOURCE = "release_source"
    CANCEL_SOURCE = "cancel_source"
    CANCEL_DESTINATION = "cancel_destination"


@dataclass(frozen=True, slots=True)
class Action:
    """Something for the driver to do, acknowledged by an `Acknowledged` with the same id."""

    action_id: int
    kind: ActionKind


class Outcome(Enum):
    SUBMITTED = "submitted"
    ACCEPTED = "accepted"
    SCHEDULED = "scheduled"
    APPLIED = "applied"
    NOOP = "noop"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Start:
    pass


@dataclass(frozen=True, slots=True)
class SourceIsHeld:
    pass


@dataclass(frozen=True, slots=True)
class SourceHasFinished:
    """The first token ended the request; the source holds nothing."""


@dataclass(frozen=True, slots=True)
class DestinationIsReserved:
    pass


@dataclass(frozen=True, slots=True)
class TransferLanded:
    pass


@dataclass(frozen=True, slots=True)
class DestinationFailed:
    """The destination, or the way to it, is of no use any more; the source is as it was."""

    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    reason: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    pass


@dataclass(frozen=True, slots=True)
class Acknowledged:
    action_id: int
    outcome: Outcome
    reason: str = ""


Event: TypeAlias = (
    Start
    | SourceIsHeld
    | SourceHasFinished
    | DestinationIsReserved
    | TransferLanded
    | DestinationFailed
    | Failed
    | Cancelled
    | Acknowledged
)

_EXPECTED: dict[ActionKind, frozenset[Outcome]] = {
    ActionKind.RESERVE_DESTINATION: frozenset({Outcome.ACCEPTED}),
    ActionKind.SUBMIT_PREFILL: frozenset({Outcome.SUBMITTED}),
    ActionKind.START_TRANSFER: frozenset({Outcome.SCHEDULED}),
    ActionKind.ACTIVATE_DESTINATION: frozenset({Outcome.APPLIED}),
    ActionKind.RELEASE_SOURCE: frozenset({Outcome.APPLIED, Outcome.NOOP}),
    ActionKind.CANCEL_SOURCE: frozenset({Outcome.APPLIED, Outcome.NOOP}),
    ActionKind.CANCEL_DESTINATION: frozenset({Outcome.APPLIED, Outcome.NOOP}),
}
_DEAF = frozenset({Phase.REDIRECTING, Phase.CLEANING_UP, Phase.DONE})
"""Phases in which a fact changes no plan."""
_NEEDS_DESTINATION = frozenset({Phase.RESERVING, Phase.PREFILLING, Phase.TRANSFERRING, Phase.ACTIVATING})
_CLEANUPS = frozenset({ActionKind.CANCEL_SOURCE, ActionKind.CANCEL_DESTINATION})


@dataclass(frozen=True, slots=True)
class Handoff:
    """The state. issued: every action so far, by id; acknowledged: their outcomes.

    completion: what DONE means, or what CLEANING_UP will end in. reason: why it failed. redirects_left: to how many
    other destinations it may go. is_held: the source said so.
    """

    handoff_id: HandoffId
    order: Order
    attempt: int = 1
    phase: Phase = Phase.NEW
    issued: tuple[Action, ...] = ()
    acknowledged: dict[int, Outcome] = field(default_factory=dict)
    completion: Completion | None = None
    reason: str = ""
    redirects_left: int = 0
    is_held: bool = False

    def has_issued(self, kind: ActionKind) -> bool:
        return any(action.kind is kind for action in self.issued)

    def outcome_of(self, kind: ActionKind) -> Outcome | None:
        """The outcome of the newest action of this kind, None while it is open or was never issued."""
        for action in reversed(self.issued):
            if action.kind is kind:
                return self.acknowledged.get(action.action_id)
        return None


class UnexpectedEvent(RuntimeError):
    """A bug of ours or a message that can't be true: this event can't happen in this state."""

    def __init__(self, handoff: Handoff, event: Event) -> None:
        super().__init__(f"handoff {handoff.handoff_id}: {event} while {handoff.phase.value}")
        self.handoff = handoff
        self.event = event


Step: TypeAlias = tuple[Handoff, tuple[Action, ...]]


def advance(handoff: Handoff, event: Event) -> Step:
    """The next state and the actions to perform. Raises UnexpectedEvent and changes nothing then."""
    match event:
        case Start():
            return _start(handoff)
        case Acknowledged():
            return _acknowledge(handoff, event)
        case Cancelled():
            return _give_up(handoff, Completion.CANCELLED, "")
        case Failed(reason):
            return _give_up(handoff, Completion.FAILED, reason)
        case DestinationFailed(reason):
            return _redirect(handoff, reason)
        case _:
            return _fact(handoff, event)


def _start(handoff: Handoff) -> Step:
    if handoff.phase is not Phase.NEW:
        return handoff, ()
    if handoff.order is Order.DESTINATION_FIRST:
        return _enter(handoff, Phase.RESERVING, ActionKind.RESERVE_DESTINATION)
    return _enter(handoff, Phase.PREFILLING, ActionKind.SUBMIT_PREFILL)


def _fact(handoff: Handoff, event: Event) -> Step:
    """A node reported something. Which phase waits for which fact:"""
    match handoff.phase, event:
        case Phase.RESERVING, DestinationIsReserved():
            _require_acknowledged(handoff, ActionKind.RESERVE_DESTINATION, event)
            if handoff.order is Order.DESTINATION_FIRST:
                return _enter(handoff, Phase.PREFILLING, ActionKind.SUBMIT_PREFILL)
            return _enter(handoff, Phase.TRANSFERRING, ActionKind.START_TRANSFER)
        case Phase.PREFILLING, SourceIsHeld():
            _require_acknowledged(handoff, ActionKind.SUBMIT_PREFILL, event)
            handoff = replace(handoff, is_held=True)
            if handoff.order is Order.DESTINATION_FIRST:
                return replace(handoff, phase=Phase.TRANSFERRING), ()
            return _enter(handoff, Phase.RESERVING, ActionKind.RESERVE_DESTINATION)
        case Phase.PREFILLING, SourceHasFinished():
            return _give_up(handoff, Completion.FINISHED_AT_SOURCE, "")
        case Phase.PREFILLING, TransferLanded() if handoff.order is Order.DESTINATION_FIRST:
            # The destination's word may overtake the source's: what has landed was held.
            _require_acknowledged(handoff, ActionKind.SUBMIT_PREFILL, event)
            handoff = replace(handoff, is_held=True)
            return _enter(handoff, Phase.ACTIVATING, ActionKind.ACTIVATE_DESTINATION)
        case Phase.TRANSFERRING, TransferLanded():
            if handoff.order is Order.SOURCE_FIRST:
                _require_acknowledged(handoff, ActionKind.START_TRANSFER, event)
            return _enter(handoff, Phase.ACTIVATING, ActionKind.ACTIVATE_DESTINATION)
        case Phase.REDIRECTING, SourceIsHeld():
            return replace(handoff, is_held=True), ()
        case Phase.REDIRECTING, SourceHasFinished():
            return _give_up(handoff, Completion.FINISHED_AT_SOURCE, "")
    if handoff.phase in _DEAF or _is_past(handoff, event):
        return handoff, ()
    raise UnexpectedEvent(handoff, event)


def _is_past(handoff: Handoff, event: Event) -> bool:
    """Whether this fact was already acted upon, so that it is a duplicate."""
    match event:
        case SourceIsHeld() if handoff.order is Order.DESTINATION_FIRST:
            return handoff.phase in (Phase.TRANSFERRING, Phase.ACTIVATING, Phase.RELEASING)
        case SourceIsHeld():
            follower = ActionKind.RESERVE_DESTINATION
        case DestinationIsReserved():
            follower = (
                ActionKind.SUBMIT_PREFILL if handoff.order is Order.DESTINATION_FIRST else ActionKind.START_TRANSFER
            )
        case TransferLanded():
            follower = ActionKind.ACTIVATE_DESTINATION
        case _:
            return False
    return handoff.has_issued(follower)


def _require_acknowledged(handoff: Handoff, kind: ActionKind, event: Event) -> None:
    if handoff.outcome_of(kind) is None:
        raise UnexpectedEvent(handoff, event)


def _acknowledge(handoff: Handoff, event: Acknowledged) -> Step:
    action = next((a for a in handoff.issued if a.action_id == event.action_id), None)
    if action is None:
        raise UnexpectedEvent(handoff, event)
    known = handoff.acknowledged.get(action.action_id)
    if known is not None:
        if known is event.outcome:
            return handoff, ()
        raise UnexpectedEvent(handoff, event)
    handoff = replace(handoff, acknowledged={**handoff.acknowledged, action.action_id: event.outcome})
    expected = event.outcome in _EXPECTED[action.kind]
    if handoff.phase is Phase.REDIRECTING and (expected or action.kind is not ActionKind.SUBMIT_PREFILL):
        return _redirected(handoff, action)
    if action.kind in _CLEANUPS:
        # A side that can't be reached to cancel keeps its blocks until its inventory is reconciled.
        if not expected:
            reasons = (handoff.reason, f"{action.kind.value}: {event.reason or event.outcome.value}")
            handoff = replace(handoff, reason="; ".join(filter(None, reasons)))
        return _finish_cleanup(handoff)
    if handoff.phase in (Phase.CLEANING_UP, Phase.DONE) or not _is_current(handoff, action):
        return handoff, ()
    complaint = "" if expected else f"{action.kind.value}: {event.reason or event.outcome.value}"
    if action.kind is ActionKind.RELEASE_SOURCE:
        return replace(handoff, phase=Phase.DONE, completion=Completion.HANDED_OVER, reason=complaint), ()
    if complaint and action.kind in (ActionKind.RESERVE_DESTINATION, ActionKind.ACTIVATE_DESTINATION):
        return _redirect(handoff, complaint)
    if complaint:
        return _give_up(handoff, Completion.FAILED, complaint)
    if action.kind is ActionKind.ACTIVATE_DESTINATION:
        return _enter(handoff, Phase.RELEASING, ActionKind.RELEASE_SOURCE)
    return handoff, ()


def _give_up(handoff: Handoff, completion: Completion, reason: str) -> Step:
    """Enter cleanup. After the activation only a cancel can still end the decode."""
    if handoff.phase is Phase.CLEANING_UP or (handoff.phase is Phase.RELEASING and completion is Completion.FAILED):
        return handoff, ()
    if handoff.phase is Phase.DONE:
        if handoff.completion is not Completion.HANDED_OVER or completion is not Completion.CANCELLED:
            return handoff, ()
        kinds = [ActionKind.CANCEL_DESTINATION]
    else:
        kinds = _cleanups_for(handoff)
        if completion is Completion.FINISHED_AT_SOURCE:
            kinds = [k for k in kinds if k is not ActionKind.CANCEL_SOURCE]
    handoff = replace(handoff, phase=Phase.CLEANING_UP, completion=completion, reason=reason)
    handoff, actions = _issue(handoff, *kinds)
    handoff, _ = _finish_cleanup(handoff)
    return handoff, actions


def _redirect(handoff: Handoff, reason: str) -> Step:
    """Give the destination up and keep the source, if it may be used for another one."""
    if handoff.phase in _DEAF or handoff.phase is Phase.RELEASING:
        return handoff, ()
    destined = handoff.phase in _NEEDS_DESTINATION and handoff.has_issued(ActionKind.RESERVE_DESTINATION)
    if not destined or not handoff.has_issued(ActionKind.SUBMIT_PREFILL) or not handoff.redirects_left:
        return _give_up(handoff, Completion.FAILED, reason)
    handoff = replace(handoff, redirects_left=handoff.redirects_left - 1, order=Order.SOURCE_FIRST, reason=reason)
    return _enter(handoff, Phase.REDIRECTING, ActionKind.CANCEL_DESTINATION)


def _redirected(handoff: Handoff, action: Action) -> Step:
    """Go on once the old destination was told. One that can't be told is lost, or will find out by itself."""
    if action.action_id != _last(handoff, ActionKind.CANCEL_DESTINATION):
        return handoff, ()
    if handoff.is_held:
        return _enter(handoff, Phase.RESERVING, ActionKind.RESERVE_DESTINATION)
    return replace(handoff, phase=Phase.PREFILLING), ()


def _last(handoff: Handoff, kind: ActionKind) -> int:
    """The id of the newest action of this kind, 0 if there is none."""
    return next((a.action_id for a in reversed(handoff.issued) if a.kind is kind), 0)


def _is_current(handoff: Handoff, action: Action) -> bool:
    """Not of a destination that was given up since."""
    return action.kind in (ActionKind.SUBMIT_PREFILL, ActionKind.RELEASE_SOURCE) or action.action_id > _last(
        handoff, ActionKind.CANCEL_DESTINATION
    )


def _cleanups_for(handoff: Handoff) -> list[ActionKind]:
    kinds = []
    if handoff.has_issued(ActionKind.SUBMIT_PREFILL):
        kinds.append(ActionKind.CANCEL_SOURCE)
    if _last(handoff, ActionKind.RESERVE_DESTINATION) > _last(handoff, ActionKind.CANCEL_DESTINATION):
        kinds.append(ActionKind.CANCEL_DESTINATION)
    return kinds


def _finish_cleanup(handoff: Handoff) -> Step:
    cleanups = [a for a in handoff.issued if a.kind in _CLEANUPS]
    if all(a.action_id in handoff.acknowledged for a in cleanups):
        return replace(handoff, phase=Phase.DONE), ()
    return handoff, ()


def _enter(handoff: Handoff, phase: Phase, kind: ActionKind) -> Step:
    return _issue(replace(handoff, phase=phase), kind)


def _issue(handoff: Handoff, *kinds: ActionKind) -> Step:
    first = len(handoff.issued) + 1
    actions = tuple(Action(first + i, kind) for i, kind in enumerate(kinds))
    return replace(handoff, issued=handoff.issued + actions), actions
