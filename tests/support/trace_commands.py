"""Requests and commands of a golden trace, from the words of a directive or the action of a coordinator."""

from handoff.coordinator import ActionKind
from scheduler.commands import (
    ActivateDestination,
    CancelDestination,
    CancelRequest,
    CancelSource,
    Command,
    ReleaseSource,
    ReserveDestination,
    Submit,
    SubmitHandoffPrefill,
)
from scheduler.ids import HandoffId, RequestId
from scheduler.request import Request

ENDINGS: dict[ActionKind, type[ActivateDestination | CancelDestination | CancelSource | ReleaseSource]] = {
    ActionKind.ACTIVATE_DESTINATION: ActivateDestination,
    ActionKind.RELEASE_SOURCE: ReleaseSource,
    ActionKind.CANCEL_SOURCE: CancelSource,
    ActionKind.CANCEL_DESTINATION: CancelDestination,
}
BY_NAME = {command.__name__: command for command in ENDINGS.values()}


def request(name: str, options: dict[str, str]) -> Request:
    """prompt=0..9+50+60..62 max_tokens=4, and maybe stop=7,8 priority=1 salt=TEXT. Raises TypeError for others."""
    return _request(name, **options)


def _request(
    name: str, *, prompt: str, max_tokens: str, stop: str = "", priority: str = "0", salt: str | None = None
) -> Request:
    return Request(
        RequestId(name),
        tuple(token for part in prompt.split("+") for token in _range(part)),
        int(max_tokens),
        stop_token_ids=frozenset(int(token) for token in stop.split(",") if token),
        priority=int(priority),
        cache_salt=salt,
    )


def _range(text: str) -> range:
    first, _, last = text.partition("..")
    return range(int(first), int(last or first) + 1)


def command(kind: str, name: str, options: dict[str, str]) -> Command:
    """Takes `attempt` and `discard` from the options; what starts a request takes those of a request as well."""
    attempt = int(options.pop("attempt", "1"))
    match kind:
        case "Submit":
            return Submit(request(name, options))
        case "SubmitHandoffPrefill":
            return SubmitHandoffPrefill(HandoffId(name), request(name, options), attempt)
        case "ReserveDestination":
            return ReserveDestination(HandoffId(name), request(name, options), attempt)
        case "CancelRequest":
            return CancelRequest(RequestId(name), options.pop("discard", "no") == "yes")
        case _:
            return BY_NAME[kind](HandoffId(name), attempt)


def of_action(kind: ActionKind, handoff_id: HandoffId, request: Request, armed: bool) -> tuple[str, Command]:
    """The node and the command of a coordinator's action. armed: the reservation activates itself."""
    match kind:
        case ActionKind.SUBMIT_PREFILL:
            return "P", SubmitHandoffPrefill(handoff_id, request)
        case ActionKind.RESERVE_DESTINATION:
            return "D", ReserveDestination(handoff_id, request, activate_when_landed=armed)
        case _:
            return ("P" if "source" in kind.value else "D"), ENDINGS[kind](handoff_id)
