"""Reaching a peer's pool, falling back to UCX, giving everything back: with real transports in one process."""

import gc
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from mmap import mmap
from pathlib import Path

import numpy as np
import pytest
from transport_nodes import TIMEOUT_S, Node, assert_moves, join, wait_until

from device.host_memory import private_memory, shared_memory
from handoff.transports.base import PeerLost, Piece, TransferError
from handoff.transports.shared_copy import Copy, PieceCopy
from handoff.transports.shared_pool import SETTING
from handoff.transports.ucx import UcxTransport
from handoff.transports.ucx_wire import Address

Start = Callable[..., Node]
KINDS = pytest.mark.parametrize("memory", [private_memory, shared_memory], ids=["private", "shared"])


def unsealed_memory(size: int) -> mmap:
    fd = os.memfd_create("prelay-test")
    os.ftruncate(fd, size)
    mapped = mmap(fd, size)
    os.close(fd)
    return mapped


@pytest.fixture
def start() -> Iterator[Start]:
    nodes: list[Node] = []

    def start_node(name: str, memory: Callable[[int], mmap] = shared_memory) -> Node:
        nodes.append(Node(name, UcxTransport(), memory))
        return nodes[-1]

    yield start_node
    for node in nodes:
        node.transport.close()


def lanes(node: Node) -> list[str]:
    wait_until(lambda: bool(node.transport.links()))
    return [link.lane for link in node.transport.links()]


def test_directions_are_independent(start: Start) -> None:
    source, destination = start("source", shared_memory), start("destination", private_memory)
    join(source, destination)
    assert lanes(source) == ["cma in, shm out"]
    assert lanes(destination) == ["shm in, cma out"]
    for left, right in ((source, destination), (destination, source)):
        left.fill(6)
        assert_moves(left, right, 1, [100_000, 5])


def test_a_pool_whose_file_may_shrink_is_left_to_ucx(start: Start) -> None:
    source, destination = start("source", unsealed_memory), start("destination", shared_memory)
    source.fill(6)
    join(source, destination)
    assert lanes(destination) == ["tcp in, shm out"]
    assert_moves(source, destination, 1, [100_000, 5])
    assert_moves(destination, source, 1, [100_000, 5])


@KINDS
@pytest.mark.parametrize("wrong", ["process", "control file"])
def test_an_address_that_names_another_is_left_to_ucx(start: Start, memory: Callable[[int], mmap], wrong: str) -> None:
    """As between PID namespaces: the numbers name a process and a file here that are not the peer's."""
    source, destination = start("source", memory), start("destination", memory)
    source.fill(6)
    address, own = (Address.unpack(node.transport.address) for node in (source, destination))
    assert address.place is not None
    assert own.place is not None
    place = replace(address.place, pid=os.getppid())
    if wrong == "control file":
        place = replace(address.place, control_fd=own.place.control_fd)
    destination.transport.connect(source.name, replace(address, place=place).pack())
    source.transport.connect(destination.name, destination.transport.address)
    assert lanes(destination)[0].startswith("tcp in")
    assert_moves(source, destination, 1, [100_000, 5])


@KINDS
def test_the_setting_leaves_all_to_ucx(
    start: Start, memory: Callable[[int], mmap], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SETTING, "n")
    off = start("off", memory)
    monkeypatch.delenv(SETTING)
    on = start("on", memory)
    join(on, off)
    assert (lanes(on), lanes(off)) == (["tcp"], ["tcp"])
    assert_moves(on, off, 1, [100_000, 5])


@KINDS
def test_a_new_transport_of_the_same_name_is_read_anew(start: Start, memory: Callable[[int], mmap]) -> None:
    destination = start("destination", memory)
    stale = b""
    for seed in (1, 2, 3):
        source = start("source", memory)
        source.fill(seed)
        if stale:
            # The address of the one before, whose descriptors now belong to this one.
            destination.transport.connect(source.name, stale)
        join(source, destination)
        assert_moves(source, destination, 1, [100_000, 5])
        stale = source.transport.address
        source.transport.close()


@KINDS
def test_ten_thousand_scattered_blocks(start: Start, memory: Callable[[int], mmap]) -> None:
    source, destination = start("source", memory), start("destination", memory)
    source.fill(6)
    join(source, destination)
    assert_moves(source, destination, 1, [2000] * 10_000)


@KINDS
def test_pieces_that_do_not_fit_end_both_sides(start: Start, memory: Callable[[int], mmap]) -> None:
    source, destination = start("source", memory), start("destination", memory)
    join(source, destination)
    outcomes = [destination.receive(source, 1, [Piece(0, 100)]), source.send(destination, 1, [Piece(0, 90)])]
    for outcome in outcomes:
        assert type(outcome.wait()) is TransferError
    assert_moves(source, destination, 1, [100])


@KINDS
def test_what_is_reused_after_a_disconnect_does_not_arrive(
    start: Start, memory: Callable[[int], mmap], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The destination is in the middle of copying, and hears of nothing."""
    begun, reused = threading.Event(), threading.Event()
    advance = PieceCopy.advance

    def wait_and_advance(self: PieceCopy, copy: Copy) -> int:
        begun.set()
        assert reused.wait(TIMEOUT_S)
        return advance(self, copy)

    source, destination = start("source", memory), start("destination", memory)
    source.fill(6)
    join(source, destination)
    assert_moves(source, destination, 1, [100])
    monkeypatch.setattr(PieceCopy, "advance", wait_and_advance)
    received, given = destination.receive(source, 1, [Piece(0, 100)]), source.send(destination, 1, [Piece(0, 100)])
    assert begun.wait(TIMEOUT_S)
    source.transport.disconnect(destination.name)
    assert isinstance(given.wait(), PeerLost)
    source.pool[:] = 0
    reused.set()
    assert isinstance(received.wait(), PeerLost)


def held() -> tuple[int, int]:
    """Descriptors, and mappings of pools."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), maps.count("/memfd:prelay-pool")


@KINDS
def test_disconnecting_gives_back_descriptors_and_mappings(start: Start, memory: Callable[[int], mmap]) -> None:
    source, destination = start("source", memory), start("destination", memory)

    def join_and_part() -> None:
        join(source, destination)
        assert_moves(source, destination, 1, [100_000])
        stuck = destination.receive(source, 2, [Piece(0, 100)])
        for node, peer in ((source, destination), (destination, source)):
            node.transport.disconnect(peer.name)
        stuck.wait()
        wait_until(lambda: not source.transport.links() and not destination.transport.links())

    join_and_part()
    before = held()
    for _ in range(4):
        join_and_part()
    assert held() == before


@KINDS
def test_closing_gives_back_descriptors(memory: Callable[[int], mmap]) -> None:
    def open_and_close() -> None:
        nodes = Node("left", UcxTransport(), memory), Node("right", UcxTransport(), memory)
        join(*nodes)
        assert_moves(*nodes, 1, [np.iinfo(np.uint16).max])
        for node in nodes:
            node.transport.close()

    open_and_close()
    before = held()
    for _ in range(3):
        open_and_close()
    assert held() <= before
