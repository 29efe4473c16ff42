"""The eight commands and their results, as frozen data.

Source: the Command page in the project's seeds; the first token travels with the handoff, and `attempt` separates a
handoff's tries, so a late message of an earlier try addresses nothing.

While a step runs only those that start something and CancelRequest are applied (MID_STEP); the others wait for the
boundary, where they find a settled state (source: the live driver of the project's handoff reference).
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from scheduler.events import LifecycleEvent
from scheduler.ids import HandoffId, NodeId, RequestId
from scheduler.request import Request


@dataclass(frozen=True, slots=True)
class Submit:
    """Run one request here from prompt to end."""

    request: Request


@dataclass(frozen=True, slots=True)
class SubmitHandoffPrefill:
    """Prefill a request, sample its first token, and hold the KV."""

    handoff_id: HandoffId
    request: Request
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class ReserveDestination:
    """Accept a request and reserve blocks for its prompt plus one token.

    activate_when_landed: arm the activation, so that the request runs as soon as its bytes have landed. The
    ActivateDestination that follows is then applied already, and acknowledged as such, once. source: the only node that
    may fill the blocks; None for any.
    """

    handoff_id: HandoffId
    request: Request
    attempt: int = 1
    activate_when_landed: bool = False
    source: NodeId | None = None


@dataclass(frozen=True, slots=True)
class ActivateDestination:
    """Make a destination whose bytes have landed runnable."""

    handoff_id: HandoffId
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class ReleaseSource:
    """Give up a source whose KV was handed over; its blocks stay as prefix cache."""

    handoff_id: HandoffId
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class CancelSource:
    """Cancel a source, pending or held."""

    handoff_id: HandoffId
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class CancelDestination:
    """Cancel a destination, pending, reserved, landed or active."""

    handoff_id: HandoffId
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """Cancel a scheduled request: waiting or running, whatever started it. Held and reserved KV is not touched.

    discard_pending_output: drop the outputs that a settled step has ready for it even if its last token is among them
    and the request is over for the scheduler.
    """

    request_id: RequestId
    discard_pending_output: bool = False


Command: TypeAlias = (
    Submit
    | SubmitHandoffPrefill
    | ReserveDestination
    | ActivateDestination
    | ReleaseSource
    | CancelSource
    | CancelDestination
    | CancelRequest
)

MID_STEP = (Submit, SubmitHandoffPrefill, ReserveDestination, CancelRequest)
"""Commands that are applied while a step runs."""


@dataclass(frozen=True, slots=True)
class Submitted:
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class DestinationAccepted:
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Applied:
    """Some state changed, or output that was ready was suppressed."""


@dataclass(frozen=True, slots=True)
class Noop:
    """Nothing that is owned here was addressed."""


CommandResult: TypeAlias = Submitted | DestinationAccepted | Applied | Noop


class CommandEffects(NamedTuple):
    """What a command did: its result, and the events and retired ids that it caused.

    suppressed_pending_output: outputs or events of the request, settled but not released yet, were dropped.
    """

    result: CommandResult
    events: tuple[LifecycleEvent, ...] = ()
    retired: tuple[RequestId, ...] = ()
    suppressed_pending_output: bool = False
    incarnation: int = 1
