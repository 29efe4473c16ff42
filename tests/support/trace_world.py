"""Executes the script of a golden trace: two schedulers, their devices and coordinators, all by hand and in one thread.

A trace is a text file. Lines that begin with ">" are directives; what follows each is what it caused. P is the prefill
node, D the decode node, NAME a request and its handoff. A block holds 4 tokens.

    > nodes decode_blocks=8 tokens=8 lease=5 ...        new nodes, with the options of trace_node.Setup
    > open NAME prompt=0..9 max_tokens=4 ...            a client's request, with a coordinator of its own
          order=destination_first|source_first  armed=yes|no (activate when landed)  stop=TOKEN  priority=N  salt=TEXT
    > cancel NAME                                       the client goes away: its coordinator is told
    > delay NAME [P] | deliver NAME                     reports of the nodes, or of one, reach its coordinator late
    > tell P CancelRequest NAME discard=yes ...         one command, by its name, from nobody's coordinator
    > step P                                            a step of a node, from boundary to boundary; or in parts:
    > launch P | settle P | boundary P                  commands that can't be applied under a step wait for `settle`
    > offer NAME                                        the source's transport begins to send
    > move NAME | lose NAME                             the bytes of a transfer land, or are lost
    > fail P | fail_effect P                            the next step or effect of a device fails
    > wait 5 | renew NAME                               time passes, in seconds; the leases of a handoff run anew
    > run                                               steps and moves until nothing is left
    > show | inventory | story P NAME                   where the blocks are, what handoffs own, a request's own log

Every token is compared with the one right answer, and comes once and in order. Expired leases count as failures of the
handoff, as a driver would have it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import trace_commands
import trace_text
from kv_machine import expected_output
from scheduler_drive import BLOCK_SIZE, copy_blocks
from trace_coordinators import Client, Coordinators
from trace_node import Setup, TraceNode

from handoff.coordinator import (
    Action,
    ActionKind,
    DestinationIsReserved,
    Failed,
    Order,
    Outcome,
    SourceHasFinished,
    SourceIsHeld,
    TransferLanded,
)
from scheduler.commands import CancelDestination, Command, ReserveDestination, Submit, SubmitHandoffPrefill
from scheduler.decode_scheduler import ReservedKv
from scheduler.errors import CommandRejected, StaleIncarnation, StepInFlight
from scheduler.events import (
    BoundaryEffects,
    DestinationReserved,
    LeaseExpired,
    LifecycleEvent,
    Output,
    Side,
    SourceFinished,
    SourceHeld,
)
from scheduler.ids import HandoffId, RequestId
from scheduler.prefill_scheduler import HeldKv
from scheduler.request import FinishReason, Request


@dataclass(slots=True)
class Transfers:
    """expected: reservations that the destination's transport may fill. offered: KV that the source's may read."""

    expected: dict[str, ReservedKv] = field(default_factory=dict)
    offered: dict[str, HeldKv] = field(default_factory=dict)


class TraceWorld:
    """See the module's docstring. Each public method but `execute` is a directive."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._coordinators = Coordinators(self._perform, self._lines)
        self._requests: dict[RequestId, Request] = {}
        self._outputs: dict[RequestId, list[int]] = {}
        self.nodes()

    def execute(self, directive: str) -> list[str]:
        """Perform one directive, without its ">". Returns what it caused."""
        name, *words = directive.split()
        options = dict(word.split("=", 1) for word in words if "=" in word)
        arguments = [word for word in words if "=" not in word]
        action: Callable[..., None] = getattr(self, name)
        action(*arguments, **options)
        self._coordinators.run()
        lines = list(self._lines)
        self._lines.clear()
        return lines

    # Directives: requests and commands

    def nodes(self, **options: str) -> None:
        setup = Setup.parse(options)
        self._now = 0.0
        self._transfers = Transfers()
        self._prefill, self._decode = setup.prefill(), setup.decode()
        self._nodes = {
            "P": TraceNode("P", self._prefill, setup.spill_blocks, self._lines),
            "D": TraceNode("D", self._decode, setup.spill_blocks, self._lines),
        }
        self._blocks = trace_text.BlockNames()

    def open(self, name: str, order: str = "destination_first", armed: str = "yes", **options: str) -> None:
        request = trace_commands.request(name, options)
        self._learn(request)
        self._coordinators.open(request, Order(order), armed=armed == "yes")

    def cancel(self, name: str) -> None:
        self._coordinators.cancel(name)

    def delay(self, name: str, nodes: str = "PD") -> None:
        self._coordinators.delay(name, nodes)

    def deliver(self, name: str) -> None:
        self._coordinators.deliver(name)

    def tell(self, node: str, kind: str, name: str, incarnation: str | None = None, **options: str) -> None:
        command = trace_commands.command(kind, name, options)
        try:
            self._apply(node, command, " ", int(incarnation) if incarnation else None)
        except (CommandRejected, StaleIncarnation, StepInFlight) as error:
            self._lines.append(f"  {type(error).__name__}: {error}")

    # Directives: steps

    def step(self, node: str) -> None:
        if not self._try_step(node):
            self._lines.append(f"{node} has nothing to run")

    def launch(self, node: str) -> None:
        self.boundary(node)
        if not self._nodes[node].launch(self._requests):
            self._lines.append(f"{node} has nothing to run")

    def settle(self, node: str) -> None:
        self._nodes[node].settle()

    def boundary(self, node: str) -> None:
        effects = self._nodes[node].boundary(self._now)
        for output in effects.outputs:
            self._require_right(output)
        self._lines += trace_text.boundary(node, effects, self._blocks)
        for event in effects.events:
            self._note(event)

    def fail(self, node: str) -> None:
        device = self._nodes[node].device
        device.fail_at.add(device.steps)

    def fail_effect(self, node: str) -> None:
        device = self._nodes[node].device
        device.fail_effects.add(len(device.effects))

    def run(self) -> None:
        self._coordinators.run()
        while self._moved() or self._stepped():
            pass

    # Directives: transfers and time

    def offer(self, name: str) -> bool:
        """False if nothing is held."""
        held = self._prefill.held(HandoffId(name), 1)
        if held is None:
            return False
        self._prefill.transfer_started(HandoffId(name), 1)
        self._transfers.offered[name] = held
        self._lines.append(f"    P offers {name}")
        return True

    def move(self, name: str) -> None:
        held, reserved = self._transfers.offered.pop(name), self._transfers.expected.pop(name, None)
        if reserved is None:
            self._lines.append(f"D refuses {name}: nothing is reserved")
            self._end_transfer("P", name)
            return
        missing = slice(reserved.cached_blocks, None)
        source, destination = (self._nodes[node].device for node in "PD")
        copy_blocks(source, held.blocks[missing], destination, reserved.blocks[missing])
        count = len(reserved.blocks) - reserved.cached_blocks
        self._lines.append(f"{count} of {len(reserved.blocks)} blocks of {name} move")
        self._between_steps("D", lambda: self._land(name, held.first_token))
        self._end_transfer("P", name)

    def lose(self, name: str) -> None:
        self._lines.append(f"the transfer of {name} breaks")
        del self._transfers.offered[name]
        del self._transfers.expected[name]
        self._end_transfer("D", name)
        self._end_transfer("P", name)
        self._coordinators.report("D", name, Failed("transfer: lost"))

    def wait(self, seconds: str) -> None:
        self._now += float(seconds)
        for name, node in self._nodes.items():
            if not node.in_step:
                self.boundary(name)

    def renew(self, name: str) -> None:
        for node in self._nodes.values():
            renewed = node.scheduler.renew(HandoffId(name), 1)
            self._lines.append(f"{node.name} {'renews the' if renewed else 'has no'} lease of {name}")

    # Directives: what it looks like

    def show(self) -> None:
        self._lines += [trace_text.blocks(name, node.scheduler.metrics()) for name, node in self._nodes.items()]

    def inventory(self) -> None:
        for name, node in self._nodes.items():
            inventory = node.scheduler.inventory()
            self._lines += [trace_text.holding(name, holding) for holding in inventory.holdings]
            self._lines += [f"{name} local {request_id}" for request_id in inventory.local]

    def story(self, node: str, name: str) -> None:
        self._lines += [f"  {line}" for line in self._nodes[node].scheduler.story(RequestId(name))]

    # Steps and what becomes visible

    def _try_step(self, name: str) -> bool:
        node = self._nodes[name]
        self.boundary(name)
        self._coordinators.run()
        if not node.launch(self._requests):
            return False
        node.settle()
        self.boundary(name)
        self._coordinators.run()
        return True

    def _moved(self) -> bool:
        names = list(self._transfers.offered)
        for name in names:
            self.move(name)
            self._coordinators.run()
        return bool(names)

    def _stepped(self) -> bool:
        stepped = [self._try_step(name) for name in self._nodes]
        return any(stepped)

    def _learn(self, request: Request, *, goes_on: bool = False) -> None:
        """goes_on: it may have outputs already."""
        name = request.request_id
        if not goes_on or name not in self._outputs:
            self._outputs[name] = []
        self._requests[name] = request
        self._blocks.learn(request, BLOCK_SIZE)

    def _require_right(self, output: Output) -> None:
        """Once, in order, and the only right token; a failed step brings none."""
        name = output.request_id
        request, before = self._requests[name], self._outputs[name]
        assert output.index == len(before), f"{name}[{output.index}] comes after {len(before)} outputs"
        if output.finish is FinishReason.ERROR:
            return
        assert output.token is not None
        before.append(output.token)
        assert before == expected_output(request.prompt, len(before)), f"{name}: {before}"

    def _note(self, event: LifecycleEvent) -> None:
        """What the node and its transport do about an event, and what the coordinator is told."""
        name, report = str(event.handoff_id), self._coordinators.report
        match event:
            case SourceHeld():
                client = self._coordinators.get(name)
                if client is not None and client.handoff.order is Order.DESTINATION_FIRST:
                    self.offer(name)
                report("P", name, SourceIsHeld())
            case SourceFinished(finish=FinishReason.ERROR):
                report("P", name, Failed("the prefill step failed"))
            case SourceFinished():
                report("P", name, SourceHasFinished())
            case DestinationReserved():
                self._expect(name)
                report("D", name, DestinationIsReserved())
            case LeaseExpired(side=Side.SOURCE):
                report("P", name, Failed("the lease of the source has expired"))
            case LeaseExpired():
                self._withdraw(name)
                report("D", name, Failed("the lease of the destination has expired"))

    # Transfers

    def _expect(self, name: str) -> None:
        reserved = self._decode.reserved(HandoffId(name), 1)
        assert reserved is not None
        self._decode.transfer_started(HandoffId(name), 1)
        self._transfers.expected[name] = reserved

    def _withdraw(self, name: str) -> None:
        """The destination doesn't want the bytes any more; those that are offered come all the same."""
        if name not in self._transfers.offered and self._transfers.expected.pop(name, None) is not None:
            self._end_transfer("D", name)

    def _land(self, name: str, first_token: int) -> None:
        if self._decode.landed(HandoffId(name), 1, first_token):
            self._coordinators.report("D", name, TransferLanded())
        else:
            self._lines.append(f"  D has no use for {name}")

    def _end_transfer(self, node: str, name: str) -> None:
        """One side's memory is quiet, without success at the destination."""
        scheduler = self._prefill if node == "P" else self._decode
        self._between_steps(node, lambda: scheduler.transfer_quiet(HandoffId(name), 1))

    def _between_steps(self, node: str, work: Callable[[], None]) -> None:
        """Now, with the boundary that shows what it brings; or when the running step is settled."""
        if self._nodes[node].in_step:
            self._nodes[node].when_settled(work)
        else:
            work()
            self.boundary(node)

    # Commands

    def _perform(self, client: Client, action: Action) -> None:
        """What a coordinator wants."""
        handoff_id = client.handoff.handoff_id
        if action.kind is ActionKind.START_TRANSFER:
            outcome = Outcome.SCHEDULED if self.offer(handoff_id) else Outcome.NOOP
            self._coordinators.acknowledge(client, action, outcome)
            return
        node, command = trace_commands.of_action(action.kind, handoff_id, client.request, client.armed)
        title = f"    {node} {type(command).__name__} {handoff_id}:"

        def apply() -> None:
            try:
                outcome, reason = Outcome(self._apply(node, command, title)), ""
            except CommandRejected as error:
                outcome, reason = Outcome.FAILED, str(error)
                self._lines.append(f"{title} failed")
            self._coordinators.acknowledge(client, action, outcome, reason)

        try:
            apply()
        except StepInFlight:
            self._lines.append(f"{title} waits for the boundary")
            self._nodes[node].when_settled(apply)

    def _apply(self, node: str, command: Command, title: str, incarnation: int | None = None) -> str:
        """Perform a command and show what it caused; its result, as a coordinator calls it."""
        effects = self._nodes[node].apply(command, incarnation)
        if isinstance(command, Submit | SubmitHandoffPrefill | ReserveDestination):
            self._learn(command.request, goes_on=isinstance(command, ReserveDestination))
        suppressed = ", and its output that was ready is dropped" if effects.suppressed_pending_output else ""
        self._lines.append(f"{title} {trace_text.result(effects)}{suppressed}")
        visible = BoundaryEffects((), (), effects.events, effects.retired)
        self._lines += trace_text.boundary(node, visible, self._blocks)
        for event in effects.events:
            self._note(event)
        if isinstance(command, CancelDestination):
            self._withdraw(command.handoff_id)
        return trace_text.result(effects)
