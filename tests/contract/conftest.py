"""Every transport that the contract suite runs over, and joined nodes."""

import threading
from collections.abc import Callable, Iterator

import pytest
from torch_threads import one_thread
from transport_nodes import Make, Node, join

from handoff.transports.memory import MemoryFabric, MemoryTransport
from handoff.transports.shared_pool import SETTING
from handoff.transports.ucx import UcxTransport

__all__ = ["one_thread"]


@pytest.fixture(params=["memory", "ucx", "ucx-shm"])
def make_transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Make:
    """ucx-shm: UCX for words, and bytes are copied from the peer's pool; ucx: UCX for both."""
    if request.param != "memory":
        monkeypatch.setenv(SETTING, "y" if request.param == "ucx-shm" else "n")
        return UcxTransport
    fabric = MemoryFabric()
    return lambda: MemoryTransport(fabric)


@pytest.fixture
def make_node(make_transport: Make) -> Iterator[Callable[[str], Node]]:
    nodes: list[Node] = []

    def make(name: str) -> Node:
        nodes.append(Node(name, make_transport()))
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
