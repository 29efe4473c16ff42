"""A decode replica: reserves blocks, lets them be filled, writes the answers."""

from handoff.node import Node
from handoff.transfer_ends import Broken, Landed, TransferEnd
from scheduler.commands import CancelDestination, Command, CommandEffects
from scheduler.decode_scheduler import DecodeScheduler
from scheduler.events import DestinationReserved, LeaseExpired, LifecycleEvent


class DecodeNode(Node[DecodeScheduler]):
    role = "decode"

    def _apply(self, command: Command) -> CommandEffects:
        effects = super()._apply(command)
        if isinstance(command, CancelDestination):
            self._exchange.withdraw(command.handoff_id, command.attempt)
        return effects

    def _on_event(self, event: LifecycleEvent) -> None:
        match event:
            case DestinationReserved(handoff_id, attempt):
                # It can be filled from the moment that the outside may know of it.
                reserved = self._scheduler.reserved(handoff_id, attempt)
                if reserved is not None:
                    self._scheduler.transfer_started(handoff_id, attempt)
                    self._exchange.expect(handoff_id, attempt, reserved)
            case LeaseExpired(handoff_id, attempt):
                self._exchange.withdraw(handoff_id, attempt)

    def _settle(self, end: TransferEnd) -> tuple[Landed | Broken, ...]:
        if isinstance(end, Landed):
            wanted = self._scheduler.landed(end.handoff_id, end.attempt, end.first_token)
            return (end,) if wanted else ()
        self._scheduler.transfer_quiet(end.handoff_id, end.attempt)
        return (end,) if isinstance(end, Broken) else ()
