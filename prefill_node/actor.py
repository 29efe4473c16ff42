"""The process of a prefill replica: builds the device, the scheduler and the exchange, and hosts the node."""

import time

from handoff.node_actor import NodeActor
from prefill_node.node import PrefillNode
from scheduler.commands import CommandEffects, SubmitHandoffPrefill
from scheduler.ids import HandoffId, NodeId
from scheduler.prefill_scheduler import PrefillScheduler


class PrefillActor(NodeActor[PrefillNode]):
    async def submit_prefill(self, command: SubmitHandoffPrefill, send_to: NodeId | None) -> CommandEffects:
        """Raises CommandRejected, LoopStopped or TimeoutError."""
        return await self._at_boundary(self._running().submit_prefill(command, send_to))

    async def start_transfer(self, handoff_id: HandoffId, attempt: int, destination: NodeId) -> bool:
        """Offer held KV to its destination. False if nothing is held under this id."""
        return await self._at_boundary(self._running().start_transfer(handoff_id, attempt, destination))

    def _build(self) -> tuple[PrefillNode, object]:
        # Here, since every process that has a handle of this actor imports this file, and torch takes seconds.
        from device.build import build_router

        config = self._config
        router = build_router(config.device)
        facts = router.facts()
        scheduler = PrefillScheduler(
            facts.total_blocks,
            facts.block_size,
            config.batch,
            max_model_len=facts.max_model_len,
            max_handoffs=config.max_holds,
            **self._scheduler_options(facts),
        )
        node = PrefillNode(
            config.node,
            config.incarnation,
            scheduler,
            router,
            self._make_exchange(facts),
            self._publish,
            time.monotonic,
            config.layerwise_tokens,
        )
        return node, router.pool.bytes_view()
