"""Executes the script of a golden trace: two schedulers, their devices and coordinators, all by hand and in one thread.

A trace is a text file. Lines that begin with ">" are directives; what follows each is what it caused.

    > nodes prefill_blocks=16 decode_blocks=16 tokens=8 sequences=4
    > open NAME prompt=0..9 max_tokens=4 order=destination_first      a client's request
    > step P                                                          one step of a node
    > move NAME                                                       the bytes of a transfer land
    > cancel NAME | fail P | show | run                               run: steps and moves until nothing is left
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from scheduler_drive import BLOCK_SIZE, Stepper, copy_blocks

from handoff.coordinator import (
    Acknowledged,
    Action,
    ActionKind,
    Cancelled,
    DestinationIsReserved,
    Event,
    Failed,
    Handoff,
    Order,
    Outcome,
    SourceHasFinished,
    SourceIsHeld,
    Start,
    TransferLanded,
    advance,
)
from scheduler.batching import BatchLimits
from scheduler.commands import (
    ActivateDestination,
    Applied,
    BoundaryEffects,
    CancelDestination,
    CancelSource,
    Command,
    DestinationAccepted,
    DestinationFinished,
    DestinationReserved,
    LifecycleEvent,
    ReleaseSource,
    ReserveDestination,
    SourceFinished,
    SourceHeld,
    SubmitHandoffPrefill,
    Submitted,
)
from scheduler.contract import StepPlan
from scheduler.decode_scheduler import DecodeScheduler, ReservedKv
from scheduler.errors import CommandRejected
from scheduler.ids import HandoffId, RequestId
from scheduler.prefill_scheduler import HeldKv, PrefillScheduler
from scheduler.request import FinishReason, Request

COMMANDS: dict[ActionKind, type[ActivateDestination | CancelDestination | CancelSource | ReleaseSource]] = {
    ActionKind.ACTIVATE_DESTINATION: ActivateDestination,
    ActionKind.RELEASE_SOURCE: ReleaseSource,
    ActionKind.CANCEL_SOURCE: CancelSource,
    ActionKind.CANCEL_DESTINATION: CancelDestination,
}


@dataclass(slots=True)
class Client:
    request: Request
    handoff: Handoff


class TraceWorld:
    """See the module's docstring."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.clients: dict[str, Client] = {}
        self.reserved: dict[str, ReservedKv] = {}
        self.moving: dict[str, HeldKv] = {}
        self.facts: deque[tuple[str, Event]] = deque()
        self.nodes()

    def execute(self, directive: str) -> list[str]:
        """Perform one directive, without its ">". Returns what it caused."""
        name, *words = directive.split()
        options = dict(word.split("=") for word in words if "=" in word)
        arguments = [word for word in words if "=" not in word]
        action: Callable[..., None] = getattr(self, name)
        action(*arguments, **options)
        self._settle()
        self.prefill.check()
        self.decode.check()
        lines, self.lines = self.lines, []
        return lines

    def nodes(
        self, prefill_blocks: str = "16", decode_blocks: str = "16", tokens: str = "8", sequences: str = "4"
    ) -> None:
        limits = BatchLimits(int(tokens), int(sequences))
        self.prefill = PrefillScheduler(int(prefill_blocks), BLOCK_SIZE, limits, max_model_len=64)
        self.decode = DecodeScheduler(int(decode_blocks), BLOCK_SIZE, limits, max_model_len=64)
        self.steppers = {"P": Stepper(self.prefill), "D": Stepper(self.decode)}

    def open(self, name: str, *, prompt: str, max_tokens: str, order: str = "destination_first") -> None:
        first, last = prompt.split("..")
        request = Request(RequestId(name), tuple(range(int(first), int(last) + 1)), int(max_tokens))
        self.clients[name] = Client(request, Handoff(HandoffId(name), Order(order)))
        self.facts.append((name, Start()))

    def cancel(self, name: str) -> None:
        self.facts.append((name, Cancelled()))

    def fail(self, node: str) -> None:
        device = self.steppers[node].device
        device.fail_at.add(device.steps)

    def step(self, node: str) -> None:
        stepper = self.steppers[node]
        known = len(stepper.plans)
        effects = stepper.step()
        if effects is None:
            self.lines.append(f"{node} has nothing to run")
            return
        self.lines.append(f"{node} {_plan(stepper.plans[known])}")
        self._boundary(node, effects)

    def move(self, name: str) -> None:
        held, reserved = self.moving.pop(name), self.reserved.pop(name)
        missing = slice(reserved.cached_blocks, None)
        devices = self.steppers["P"].device, self.steppers["D"].device
        copy_blocks(devices[0], held.blocks[missing], devices[1], reserved.blocks[missing])
        count = len(reserved.blocks) - reserved.cached_blocks
        self.lines.append(f"{count} of {len(reserved.blocks)} blocks of {name} move")
        wanted = self.decode.landed(HandoffId(name), 1, held.first_token)
        if wanted:
            self.facts.append((name, TransferLanded()))
        self._boundary("D", self.decode.take_effects())
        self.prefill.transfer_quiet(HandoffId(name), 1)
        self._boundary("P", self.prefill.take_effects())

    def run(self) -> None:
        busy = True
        while busy:
            busy = False
            for name in list(self.moving):
                self.move(name)
                self._settle()
                busy = True
            for node in self.steppers:
                scheduler = self.steppers[node].scheduler
                if scheduler.batcher.running or scheduler.batcher.waiting:
                    self.step(node)
                    self._settle()
                    busy = busy or not self.lines[-1].endswith("nothing to run")

    def show(self) -> None:
        for node, stepper in self.steppers.items():
            o = stepper.scheduler.occupancy()
            counts = {"held": o.held, "reserved": o.reserved, "draining": o.draining, "active": o.active}
            parts = [f"{name} {count}" for name, count in counts.items() if count]
            self.lines.append(f"{node} " + ", ".join([*parts, f"cached {o.cached}", f"free {o.free} of {o.total}"]))

    def _settle(self) -> None:
        """Feed the coordinators until they wait for a node."""
        while self.facts:
            name, fact = self.facts.popleft()
            self._feed(name, fact)

    def _feed(self, name: str, event: Event) -> None:
        client = self.clients[name]
        before = client.handoff.phase
        client.handoff, actions = advance(client.handoff, event)
        after = client.handoff
        if after.phase is not before:
            ending = f" ({after.completion.value})" if after.completion else ""
            reason = f": {after.reason}" if after.reason else ""
            self.lines.append(f"  {name} {before.value} -> {after.phase.value}{ending}{reason}")
        for acknowledged in [self._perform(name, action) for action in actions]:
            self._feed(name, acknowledged)

    def _perform(self, name: str, action: Action) -> Acknowledged:
        if action.kind is ActionKind.START_TRANSFER:
            self._offer(name)
            return Acknowledged(action.action_id, Outcome.SCHEDULED)
        node, command = self._command(name, action.kind)
        outcome, reason = self._apply(name, node, command)
        self.lines.append(f"    {node} {type(command).__name__} {name}: {outcome.value}")
        if isinstance(command, CancelDestination) and name in self.reserved and name not in self.moving:
            del self.reserved[name]
            self.decode.transfer_quiet(HandoffId(name), 1)
            self._boundary("D", self.decode.take_effects())
        return Acknowledged(action.action_id, outcome, reason)

    def _offer(self, name: str) -> None:
        held = self.prefill.held(HandoffId(name), 1)
        assert held is not None
        self.prefill.transfer_started(HandoffId(name), 1)
        self.moving[name] = held
        self.lines.append(f"    P offers {name}")

    def _command(self, name: str, kind: ActionKind) -> tuple[str, Command]:
        request, handoff_id = self.clients[name].request, HandoffId(name)
        if kind is ActionKind.SUBMIT_PREFILL:
            return "P", SubmitHandoffPrefill(handoff_id, request)
        if kind is ActionKind.RESERVE_DESTINATION:
            return "D", ReserveDestination(handoff_id, request)
        return ("P" if "source" in kind.value else "D"), COMMANDS[kind](handoff_id)

    def _apply(self, name: str, node: str, command: Command) -> tuple[Outcome, str]:
        try:
            effects = self.steppers[node].scheduler.apply(command)
        except CommandRejected as error:
            return Outcome.FAILED, str(error)
        self._boundary(node, BoundaryEffects((), effects.events, effects.retired))
        match effects.result:
            case Submitted():
                return Outcome.SUBMITTED, ""
            case DestinationAccepted():
                return Outcome.ACCEPTED, ""
            case Applied():
                return Outcome.APPLIED, ""
            case _:
                return Outcome.NOOP, ""

    def _boundary(self, node: str, effects: BoundaryEffects) -> None:
        for output in effects.outputs:
            ending = f" {output.finish.value}" if output.finish else ""
            self.lines.append(f"  {output.request_id}[{output.index}] = {output.token}{ending}")
        for event in effects.events:
            self.lines.append(f"  {node} {_event(event)}")
            self._note(event)
        if effects.retired:
            self.lines.append(f"  {node} retires {', '.join(effects.retired)}")

    def _note(self, event: LifecycleEvent) -> None:
        name = str(event.handoff_id)
        match event:
            case SourceHeld():
                if self.clients[name].handoff.order is Order.DESTINATION_FIRST:
                    self._offer(name)
                self.facts.append((name, SourceIsHeld()))
            case SourceFinished(finish=FinishReason.ERROR):
                self.facts.append((name, Failed("the prefill step failed")))
            case SourceFinished():
                self.facts.append((name, SourceHasFinished()))
            case DestinationReserved():
                reserved = self.decode.reserved(event.handoff_id, 1)
                assert reserved is not None
                self.decode.transfer_started(event.handoff_id, 1)
                self.reserved[name] = reserved
                self.facts.append((name, DestinationIsReserved()))
            case DestinationFinished():
                pass


def _plan(plan: StepPlan) -> str:
    rows = [
        f"{row.request_id}[{row.start}..{row.start + len(row.tokens) - 1}]{'' if row.draw else ' no draw'}"
        for row in plan.rows
    ]
    return f"{type(plan).__name__.lower()} {', '.join(rows)}"


def _event(event: LifecycleEvent) -> str:
    match event:
        case SourceHeld():
            return f"holds {event.handoff_id}: {event.prompt_tokens} tokens, {event.cached_tokens} cached"
        case SourceFinished():
            return f"finished {event.handoff_id}: {event.finish.value}"
        case DestinationReserved():
            return f"reserves {event.handoff_id}: {event.missing_blocks} of {event.prompt_blocks} blocks missing"
        case DestinationFinished():
            return f"finished {event.handoff_id}: {event.finish.value}"
