"""Keeps the leases of handoffs alive, for as long as somebody follows them.

A node frees by itself what a handoff owns there once nobody has renewed its lease for `lease_s`: so a coordinator that
is gone, or that has forgotten a handoff, leaves nothing behind.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

import structlog

from scheduler.ids import HandoffId, NodeId

log = structlog.get_logger()

HandoffKey: TypeAlias = tuple[HandoffId, int]
"""handoff_id, attempt"""

RENEWALS_PER_LEASE = 3
"""Two renewals in a row may be lost or late before a lease expires."""


class LeasePort(Protocol):
    """How renewals reach nodes. Any exception means: not renewed."""

    async def renew_leases(self, node: NodeId, handoffs: Sequence[HandoffKey]) -> None: ...


class LeaseKeeper:
    """live: the handoffs to keep, by node; asked before each round. lease_s: how long a lease runs.

    sleep: as asyncio.sleep.
    """

    def __init__(
        self,
        nodes: LeasePort,
        live: Callable[[], Mapping[NodeId, Sequence[HandoffKey]]],
        lease_s: float,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._nodes = nodes
        self._live = live
        self._period_s = lease_s / RENEWALS_PER_LEASE
        self._sleep = sleep

    async def run(self) -> None:
        """Renew for ever. A node that doesn't answer delays no other."""
        while True:
            await asyncio.gather(self._sleep(self._period_s), self.renew())

    async def renew(self) -> None:
        """One round: one call for each node."""
        await asyncio.gather(*(self._renew(node, handoffs) for node, handoffs in self._live().items()))

    async def _renew(self, node: NodeId, handoffs: Sequence[HandoffKey]) -> None:
        try:
            await asyncio.wait_for(self._nodes.renew_leases(node, handoffs), self._period_s)
        except Exception as error:
            reason = str(error) or type(error).__name__
            log.warning("leases not renewed", node=node, handoffs=len(handoffs), reason=reason)
