"""What the driver needs of others: nodes to command, and a choice of another destination."""

from collections.abc import Callable, Collection
from typing import Protocol

from scheduler.commands import Command, CommandEffects, SubmitHandoffPrefill
from scheduler.ids import HandoffId, NodeId
from scheduler.request import Request


class NodePort(Protocol):
    """How the driver reaches nodes. Any exception means: not acknowledged."""

    async def apply(self, node: NodeId, command: Command) -> CommandEffects: ...

    async def submit_prefill(
        self, node: NodeId, command: SubmitHandoffPrefill, send_to: NodeId | None
    ) -> CommandEffects:
        """send_to: where the held KV goes as soon as there is some; None waits for start_transfer."""
        ...

    async def start_transfer(self, node: NodeId, handoff_id: HandoffId, attempt: int, destination: NodeId) -> bool:
        """False if nothing is held. Raises StillSending while bytes are under way to another destination."""
        ...


Choose = Callable[[Request, Collection[NodeId]], NodeId | None]
"""Another destination for a request, none of these; None if there is none."""
