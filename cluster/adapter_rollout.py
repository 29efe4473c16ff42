"""A LoRA adapter on all nodes or on none: the order in which they load and unload it, and what a failure leaves.

One node after another. A node holds admission until it is quiet, and what it runs may need a place on another node to
end: two nodes that wait at the same time could wait for each other.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from scheduler.adapters import AdapterFacts, AdapterRefused, ListAdapters, LoadAdapter, LoraCommand, UnloadAdapter
from scheduler.ids import NodeId

log = structlog.get_logger()


class AdapterPort(Protocol):
    async def lora(self, node: NodeId, command: LoraCommand) -> tuple[AdapterFacts, ...]:
        """The node's table after the command. Raises AdapterRefused, TimeoutError, and whatever a lost node does."""
        ...


class AdapterUnsettled(RuntimeError):
    """Some nodes may have an adapter and others not: the sentence says why. Unloading it settles that."""


class AdapterRollout:
    """nodes: who serves now, prefill nodes first. node_timeout_s: the longest wait for one node's answer."""

    def __init__(self, port: AdapterPort, nodes: Callable[[], Sequence[NodeId]], node_timeout_s: float) -> None:
        self._port = port
        self._nodes = nodes
        self._node_timeout_s = node_timeout_s
        self._turn = asyncio.Lock()

    async def load(self, name: str, path: str) -> str:
        """Load it on every node and return its digest. The name must be new.

        Raises AdapterRefused when no node has it in the end, AdapterUnsettled when some may.
        """
        async with self._turn:
            loaded: dict[NodeId, str] = {}
            for node in self._nodes():
                try:
                    loaded[node] = _digest(await self._ask(node, LoadAdapter(name, path)), name)
                    _require_equal(name, loaded)
                except Exception as error:
                    await self._undo(name, node, list(loaded), error)
            return next(iter(loaded.values()))

    async def unload(self, name: str) -> None:
        """Unload it from every node that has it. No new request may name it any more.

        Raises AdapterRefused while requests on some node wait for it, AdapterUnsettled when a node does not answer;
        the nodes after that one keep it, and unloading again goes on there.
        """
        async with self._turn:
            for node in self._nodes():
                try:
                    await self._drop(node, name)
                except AdapterRefused:
                    raise
                except Exception as error:
                    raise AdapterUnsettled(
                        f"adapter {name} could not be unloaded from {node} ({_reason(error)}): unload it again"
                    ) from error

    async def _undo(self, name: str, failed: NodeId, loaded: list[NodeId], error: Exception) -> None:
        """Unload it from where it is, newest first; then raise for `error`."""
        # A refusal leaves the node's table as it was. After any other failure nobody knows.
        left = [] if failed in loaded or isinstance(error, AdapterRefused) else [failed]
        for node in reversed(loaded):
            try:
                await self._drop(node, name)
            except Exception as stuck:
                log.error("adapter not unloaded", adapter=name, node=node, reason=_reason(stuck))
                left.append(node)
        if not left:
            raise error
        raise AdapterUnsettled(
            f"adapter {name} was not loaded on {failed} ({_reason(error)}) and {', '.join(left)} may have it: unload it"
        ) from error

    async def _drop(self, node: NodeId, name: str) -> None:
        """Nothing happens where it isn't loaded."""
        try:
            await self._ask(node, UnloadAdapter(name))
        except AdapterRefused:
            if any(facts.name == name for facts in await self._ask(node, ListAdapters())):
                raise

    async def _ask(self, node: NodeId, command: LoraCommand) -> tuple[AdapterFacts, ...]:
        return await asyncio.wait_for(self._port.lora(node, command), self._node_timeout_s)


def _digest(table: Sequence[AdapterFacts], name: str) -> str:
    return next(facts.digest for facts in table if facts.name == name)


def _require_equal(name: str, digests: dict[NodeId, str]) -> None:
    (first, expected), *others = digests.items()
    for node, digest in others:
        if digest != expected:
            raise AdapterRefused(
                f"adapter {name} is not the same on {first} and {node}: put the same files at its path on all nodes"
            )


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it did not become quiet in time"
    return str(error).partition("\n")[0] or type(error).__name__
