"""Every transport that the contract suite runs over, and joined nodes."""

import threading
from collections.abc import Callable, Iterator

import pytest
from torch_threads import one_thread
from transport_nodes import Make, Node, join

from device.host_memory import private_memory, shared_memory
from handoff.transports.memory import MemoryFabric, MemoryTransport
from handoff.transports.shared_pool import SETTING
from handoff.transports.ucx import UcxTransport

__all__ = ["one_thread"]


@pytest.fixture(params=["memory", "ucx", "ucx-shm", "ucx-cma"])
def way(request: pytest.FixtureRequest) -> str:
    """ucx: UCX moves the bytes too. ucx-shm, ucx-cma: the receiver copies from the sender's shared, private pool."""
    return str(request.param)


@pytest.fixture
def make_transport(way: str, monkeypatch: pytest.MonkeyPatch) -> Make:
    if way != "memory":
        monkeypatch.setenv(SETTING, "n" if way == "ucx" else "y")
        return UcxTransport
    fabric = MemoryFabric()
    return lambda: MemoryTransport(fabric)


@pytest.fixture
def make_node(make_transport: Make, way: str) -> Iterator[Callable[[str], Node]]:
    nodes: list[Node] = []
    memory = shared_memory if way == "ucx-shm" else private_memory

    def make(name: str) -> Node:
        nodes.append(Node(name, make_transport(), memory))
        return nodes[-1]

    yield make
    for node in nodes:
        node.transport.close()
    assert not [t.name for t in threading.enumerate() if t.name.startswith(("ucx-", "memory-"))]


@pytest.fixture
def pair(make_node: Callable[[str], Node]) -> tuple[Node, Node]:
    """(source, destination), joined; the source's pool is random, the destination's is zero."""
    source, destination = make_node("source"), make_node("destination")
    source.fill(1)
    join(source, destination)
    return source, destination
