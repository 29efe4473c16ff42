"""The memory transport's gate: transfers that are stopped in the middle, and cancelled there."""

import queue
import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from handoff.transports.base import PeerLost, Piece, TransferError
from handoff.transports.memory import MemoryFabric, MemoryTransport

TIMEOUT_S = 10.0
LENGTH = 10
PIECES = [Piece(index * LENGTH, LENGTH) for index in range(5)]
Outcomes = queue.SimpleQueue[TransferError | None]


class World:
    """Two joined nodes; the source's pool is all ones, the destination's all zeros."""

    def __init__(self) -> None:
        self.fabric = MemoryFabric()
        self.source, self.destination = MemoryTransport(self.fabric), MemoryTransport(self.fabric)
        self.target: npt.NDArray[np.uint8] = np.zeros(100, np.uint8)
        self.source.start("source", np.ones(100, np.uint8), lambda peer, frame: None)
        self.destination.start("destination", self.target, lambda peer, frame: None)
        self.source.connect("destination", self.destination.address)
        self.destination.connect("source", self.source.address)
        self.sent: Outcomes = queue.SimpleQueue()
        self.received: Outcomes = queue.SimpleQueue()

    def move(self) -> None:
        self.destination.post_receive("source", 1, PIECES, self.received.put)
        self.source.post_send("destination", 1, PIECES, self.sent.put)

    def settle(self) -> None:
        """Both threads have done all that they were asked, and have looked again at what they can do."""
        for _ in range(3):
            for transport in (self.source, self.destination):
                turned: Outcomes = queue.SimpleQueue()
                transport.post_receive("nobody", 1, PIECES, turned.put)
                assert isinstance(turned.get(timeout=TIMEOUT_S), PeerLost)


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.source.close()
    world.destination.close()


def test_a_held_transfer_stops_after_the_allowed_pieces_and_goes_on(world: World) -> None:
    world.fabric.hold(after_pieces=2)
    world.move()
    assert world.fabric.wait_held(TIMEOUT_S)
    assert int(world.target.sum()) == 2 * LENGTH
    assert world.received.empty()
    assert world.sent.empty()
    world.fabric.release()
    assert world.received.get(timeout=TIMEOUT_S) is None
    assert world.sent.get(timeout=TIMEOUT_S) is None
    assert int(world.target.sum()) == 5 * LENGTH


@pytest.mark.parametrize("copied", [0, 1, 4])
def test_a_destination_that_gives_up_in_the_middle_gets_no_more_bytes(world: World, copied: int) -> None:
    world.fabric.hold(after_pieces=copied)
    world.move()
    assert world.fabric.wait_held(TIMEOUT_S)
    world.destination.disconnect("source")
    assert isinstance(world.received.get(timeout=TIMEOUT_S), PeerLost)
    world.fabric.release()
    world.settle()
    assert int(world.target.sum()) == copied * LENGTH
    assert world.sent.empty()
    world.source.disconnect("destination")
    assert isinstance(world.sent.get(timeout=TIMEOUT_S), PeerLost)


def test_a_source_that_gives_up_in_the_middle_is_read_no_more(world: World) -> None:
    world.fabric.hold(after_pieces=3)
    world.move()
    assert world.fabric.wait_held(TIMEOUT_S)
    world.source.disconnect("destination")
    assert isinstance(world.sent.get(timeout=TIMEOUT_S), PeerLost)
    world.fabric.release()
    world.settle()
    assert int(world.target.sum()) == 3 * LENGTH
    assert world.received.empty()
    world.destination.disconnect("source")
    assert isinstance(world.received.get(timeout=TIMEOUT_S), PeerLost)


def test_closing_while_held_ends_everything(world: World) -> None:
    world.fabric.hold()
    world.move()
    assert world.fabric.wait_held(TIMEOUT_S)
    world.destination.close()
    world.source.close()
    assert isinstance(world.received.get(timeout=TIMEOUT_S), PeerLost)
    assert isinstance(world.sent.get(timeout=TIMEOUT_S), PeerLost)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("memory-")]


def test_sides_that_post_other_pieces_both_fail(world: World) -> None:
    world.destination.post_receive("source", 1, [Piece(0, 10)], world.received.put)
    world.source.post_send("destination", 1, [Piece(0, 11)], world.sent.put)
    for outcomes in (world.received, world.sent):
        error = outcomes.get(timeout=TIMEOUT_S)
        assert "posted other pieces" in str(error)
        assert not isinstance(error, PeerLost)
    assert not world.target.any()


def test_device_pools_are_refused() -> None:
    class DevicePool:
        __cuda_array_interface__ = {"shape": (1,), "typestr": "|u1", "data": (1, False), "version": 3}  # noqa: RUF012

    with pytest.raises(TypeError, match="host memory only"):
        MemoryTransport(MemoryFabric()).start("node", DevicePool(), lambda peer, frame: None)
