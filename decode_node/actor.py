"""The process of a decode replica: builds the device, the scheduler and the exchange, and hosts the node."""

import time

from decode_node.node import DecodeNode
from handoff.node_actor import NodeActor
from scheduler.decode_scheduler import DecodeScheduler


class DecodeActor(NodeActor[DecodeNode]):
    def _build(self) -> tuple[DecodeNode, object]:
        # Here, since every process that has a handle of this actor imports this file, and torch takes seconds.
        from device.build import build_router

        config = self._config
        router = build_router(config.device)
        facts = router.facts()
        scheduler = DecodeScheduler(
            facts.total_blocks,
            facts.block_size,
            config.batch,
            max_model_len=facts.max_model_len,
            max_reservations=config.max_reservations,
            **self._scheduler_options(facts),
        )
        node = DecodeNode(
            config.node,
            config.incarnation,
            scheduler,
            router,
            self._make_exchange(facts),
            self._publish,
            time.monotonic,
        )
        return node, router.pool.bytes_view()
