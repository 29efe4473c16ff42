"""The eight commands, their results, the lifecycle events, and what a boundary releases, as frozen data.

Source: the Command page in the project's seeds; the first token travels with the handoff, and `attempt` separates a
handoff's tries, so a late message of an earlier try addresses nothing.
"""

from dataclasses import dataclass
from typing import TypeAlias

from scheduler.ids import HandoffId, RequestId
from scheduler.request import FinishReason, Request


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
    ActivateDestination that follows is then applied already, and acknowledged as such, once.
    """

    handoff_id: HandoffId
    request: Request
    attempt: int = 1
    activate_when_landed: bool = False


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
    """Cancel a scheduled request: waiting or running, whatever started it. Held and reserved KV is not touched."""

    request_id: RequestId


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


@dataclass(frozen=True, slots=True)
class Submitted:
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class DestinationAccepted:
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Applied:
    """Some state changed."""


@dataclass(frozen=True, slots=True)
class Noop:
    """Nothing that is owned here was addressed."""


CommandResult: TypeAlias = Submitted | DestinationAccepted | Applied | Noop


@dataclass(frozen=True, slots=True)
class SourceHeld:
    """The prompt is prefilled, the first token sampled, the KV held.

    cached_tokens: prompt tokens whose KV was found in this node's prefix cache.
    """

    handoff_id: HandoffId
    attempt: int
    request_id: RequestId
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class SourceFinished:
    """The first token ended the request: nothing is held and nothing needs to be handed over."""

    handoff_id: HandoffId
    attempt: int
    request_id: RequestId
    finish: FinishReason


@dataclass(frozen=True, slots=True)
class DestinationReserved:
    """Blocks are reserved; `missing_blocks` of the `prompt_blocks` must travel, the others are cached here."""

    handoff_id: HandoffId
    attempt: int
    request_id: RequestId
    prompt_blocks: int
    missing_blocks: int


@dataclass(frozen=True, slots=True)
class DestinationFinished:
    """An activated destination wrote its last token; its blocks are free or prefix cache."""

    handoff_id: HandoffId
    attempt: int
    request_id: RequestId
    finish: FinishReason


LifecycleEvent: TypeAlias = SourceHeld | SourceFinished | DestinationReserved | DestinationFinished


@dataclass(frozen=True, slots=True)
class Output:
    """One sampled token: the `index`-th of its request, from 0; None where the request failed before it.

    cached_tokens: prompt tokens found in the prefix cache, set on index 0.
    """

    request_id: RequestId
    index: int
    token: int | None
    finish: FinishReason | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class CommandEffects:
    """What a command did: its result, and the events and retired ids that it caused."""

    result: CommandResult
    events: tuple[LifecycleEvent, ...] = ()
    retired: tuple[RequestId, ...] = ()


@dataclass(frozen=True, slots=True)
class BoundaryEffects:
    """What becomes visible at a boundary. Consumers handle outputs before events."""

    outputs: tuple[Output, ...] = ()
    events: tuple[LifecycleEvent, ...] = ()
    retired: tuple[RequestId, ...] = ()
