"""An adapter is on all nodes or on none, node after node; what nobody can know is said."""

import asyncio
from collections.abc import Sequence

import pytest

from cluster.adapter_rollout import AdapterRollout, AdapterUnsettled
from scheduler.adapters import AdapterFacts, AdapterRefused, ListAdapters, LoadAdapter, LoraCommand, UnloadAdapter
from scheduler.ids import NodeId

NODES = tuple(map(NodeId, ("prefill-0", "prefill-1", "decode-0", "decode-1")))
P0, P1, D0, D1 = NODES
NODE_TIMEOUT_S = 0.05


class Nodes:
    """An AdapterPort. log: loads and unloads as asked for. errors: what a node answers instead of doing so."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.tables: dict[NodeId, dict[str, str]] = {node: {} for node in NODES}
        self.digests: dict[NodeId, str] = {}
        self.load_errors: dict[NodeId, Exception] = {}
        self.unload_errors: dict[NodeId, Exception] = {}
        self.silent: set[NodeId] = set()
        self.open = 0

    async def lora(self, node: NodeId, command: LoraCommand) -> tuple[AdapterFacts, ...]:
        assert self.open == 0, "two nodes at once"
        self.open += 1
        try:
            await asyncio.sleep(0)
            if node in self.silent:
                await asyncio.Event().wait()
            return self._do(node, command)
        finally:
            self.open -= 1

    def _do(self, node: NodeId, command: LoraCommand) -> tuple[AdapterFacts, ...]:
        table = self.tables[node]
        match command:
            case LoadAdapter(name, path):
                self.log.append(f"load {node}")
                if node in self.load_errors:
                    raise self.load_errors[node]
                table[name] = self.digests.get(node, f"digest of {path}")
            case UnloadAdapter(name):
                self.log.append(f"unload {node}")
                if node in self.unload_errors:
                    raise self.unload_errors[node]
                if name not in table:
                    raise AdapterRefused(f"adapter {name} is not loaded")
                del table[name]
            case ListAdapters():
                pass
        return tuple(AdapterFacts(name, digest, 8, ("q_proj",)) for name, digest in table.items())

    def having(self, name: str) -> list[NodeId]:
        return [node for node in NODES if name in self.tables[node]]


@pytest.fixture
def nodes() -> Nodes:
    return Nodes()


def rollout(nodes: Nodes, alive: Sequence[NodeId] = NODES) -> AdapterRollout:
    return AdapterRollout(nodes, lambda: alive, NODE_TIMEOUT_S)


async def test_nodes_load_and_unload_in_order(nodes: Nodes) -> None:
    adapters = rollout(nodes)
    assert await adapters.load("sql", "/a") == "digest of /a"
    assert nodes.having("sql") == list(NODES)
    await adapters.unload("sql")
    assert nodes.having("sql") == []
    assert nodes.log == [f"{what} {node}" for what in ("load", "unload") for node in NODES]


async def test_changes_wait_for_each_other(nodes: Nodes) -> None:
    adapters = rollout(nodes)
    await asyncio.gather(adapters.load("a", "/a"), adapters.load("b", "/b"))
    assert nodes.log == [f"load {node}" for node in NODES] * 2
    assert nodes.having("a") == nodes.having("b") == list(NODES)


async def test_a_refusal_takes_it_back_newest_first(nodes: Nodes) -> None:
    nodes.load_errors[D0] = AdapterRefused("rank 512 is over 256")
    with pytest.raises(AdapterRefused, match=r"^rank 512 is over 256$"):
        await rollout(nodes).load("sql", "/a")
    assert nodes.log == [f"load {P0}", f"load {P1}", f"load {D0}", f"unload {P1}", f"unload {P0}"]
    assert nodes.having("sql") == []


async def test_other_content_on_one_node_is_taken_back_there_too(nodes: Nodes) -> None:
    nodes.digests[D0] = "other"
    with pytest.raises(AdapterRefused, match="not the same on prefill-0 and decode-0: put the same files"):
        await rollout(nodes).load("sql", "/a")
    assert nodes.having("sql") == []
    assert f"load {D1}" not in nodes.log


async def test_a_node_that_does_not_answer_may_have_it(nodes: Nodes) -> None:
    nodes.silent.add(P1)
    with pytest.raises(AdapterUnsettled, match=r"prefill-1 \(it did not become quiet in time\) and prefill-1 may"):
        await rollout(nodes).load("sql", "/a")
    assert nodes.having("sql") == []
    nodes.silent.clear()
    await rollout(nodes).unload("sql")  # settles it, though no node has it


async def test_who_does_not_let_it_go_is_named(nodes: Nodes) -> None:
    nodes.load_errors[P1] = AdapterRefused("too many")
    nodes.unload_errors[P0] = ConnectionError("gone")
    with pytest.raises(AdapterUnsettled, match=r"not loaded on prefill-1 \(too many\) and prefill-0 may have it"):
        await rollout(nodes).load("sql", "/a")


async def test_a_refused_unload_stops_and_goes_on_when_asked_again(nodes: Nodes) -> None:
    adapters = rollout(nodes)
    await adapters.load("sql", "/a")
    nodes.unload_errors[P1] = AdapterRefused("2 requests wait for adapter sql")
    with pytest.raises(AdapterRefused, match=r"^2 requests wait"):
        await adapters.unload("sql")
    assert nodes.having("sql") == [P1, D0, D1]
    nodes.unload_errors.clear()
    await adapters.unload("sql")
    assert nodes.having("sql") == []


async def test_an_unload_that_a_node_does_not_answer_is_unsettled(nodes: Nodes) -> None:
    adapters = rollout(nodes)
    await adapters.load("sql", "/a")
    nodes.silent.add(D0)
    with pytest.raises(AdapterUnsettled, match=r"could not be unloaded from decode-0 .* unload it again"):
        await adapters.unload("sql")
    assert nodes.having("sql") == [D0, D1]


async def test_lost_nodes_are_left_out(nodes: Nodes) -> None:
    await rollout(nodes, [P1, D0]).load("sql", "/a")
    assert nodes.having("sql") == [P1, D0]
