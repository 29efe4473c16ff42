"""A decode replica: reserves blocks, lets them be filled, writes the answers."""

from handoff.exchange import Broken, Landed, TransferEnd
from handoff.node import Node
from scheduler.commands import (
    BoundaryEffects,
    CancelDestination,
    Command,
    CommandEffects,
    DestinationReserved,
)
from scheduler.decode_scheduler import DecodeScheduler


class DecodeNode(Node[DecodeScheduler]):
    role = "decode"

    def _apply(self, command: Command) -> CommandEffects:
        effects = self._scheduler.apply(command)
        self._observe(BoundaryEffects(events=effects.events))
        # A command can let other handoffs' reservations through. Their drivers don't see this command's reply, and
        # the caller's copy may be lost with it; facts may come twice.
        self._emit(BoundaryEffects(events=effects.events), ())
        if isinstance(command, CancelDestination):
            self._exchange.withdraw(command.handoff_id, command.attempt)
        return effects

    def _observe(self, effects: BoundaryEffects) -> None:
        """A reservation can be filled from the moment that the outside may know of it."""
        for event in effects.events:
            if isinstance(event, DestinationReserved):
                reserved = self._scheduler.reserved(event.handoff_id, event.attempt)
                if reserved is not None:
                    self._scheduler.transfer_started(event.handoff_id, event.attempt)
                    self._exchange.expect(event.handoff_id, event.attempt, reserved)

    def _settle(self, end: TransferEnd) -> tuple[Landed | Broken, ...]:
        if isinstance(end, Landed):
            wanted = self._scheduler.landed(end.handoff_id, end.attempt, end.first_token)
            return (end,) if wanted else ()
        self._scheduler.transfer_quiet(end.handoff_id, end.attempt)
        return (end,) if isinstance(end, Broken) else ()
