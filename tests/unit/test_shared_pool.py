"""Where a pool lies, from what the kernel says; offers; the control file; the kind of the pool's memory."""

import ctypes
import mmap
import os

import numpy as np
import pytest

from device.host_memory import pool_kind, pool_memory
from handoff.transports.base import Piece
from handoff.transports.control_file import ControlFile, belongs_to, stands
from handoff.transports.shared_pool import Region, region_in, shared_pools_allowed
from handoff.transports.ucx_offer import FRAME_PIECES, Offer, OfferPart, columns, parts_of
from handoff.transports.ucx_wire import Address, PoolPlace

MAPS = """\
55d0a0000000-55d0a0021000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0000100000 rw-s 00002000 00:01 4711                       /memfd:prelay-pool (deleted)
7f0000200000-7f0000300000 rw-p 00000000 00:01 4712                       /memfd:private (deleted)
7f0000400000-7f0000500000 rw-s 00000000 08:02 4713                       /home/a file
7f0000600000-7f0000700000 rw-p 00000000 00:00 0
"""
IDENTITY = b"identity"


@pytest.mark.parametrize(
    ("address", "size", "region"),
    [
        (0x7F0000000000, 1 << 20, Region(os.makedev(0, 1), 4711, 0x2000)),
        (0x7F0000000010, 100, Region(os.makedev(0, 1), 4711, 0x2010)),
        (0x7F0000000010, 1 << 20, None),  # Reaches behind the mapping.
        (0x7F0000200000, 10, None),  # A private mapping of a file: what is written stays here.
        (0x7F0000400000, 10, None),  # On a disk.
        (0x7F0000600000, 10, None),
        (0x55D0A0000000, 10, None),
        (0x1000, 10, None),
    ],
)
def test_a_pool_is_found_in_the_list_of_mappings(address: int, size: int, region: Region | None) -> None:
    assert region_in(MAPS, address, size) == region


@pytest.mark.parametrize("place", [None, PoolPlace(7, 8, 1 << 46, 1 << 40), PoolPlace(7, 8, 9, 10, 11, 12, 13, 14)])
def test_places_travel_in_addresses(place: PoolPlace | None) -> None:
    address = Address(IDENTITY, b"h" * 16, b"worker", place)
    assert Address.unpack(address.pack()) == address


@pytest.mark.parametrize("count", [1, FRAME_PIECES, FRAME_PIECES + 1, 2 * FRAME_PIECES + 5])
def test_offers_come_back_whole(count: int) -> None:
    pieces = [Piece(index * 3, index + 1) for index in range(count)]
    frames = [part.pack() for part in parts_of(2**32 - 1, 5, *columns(pieces))]
    assert len(frames) == -(-count // FRAME_PIECES)
    first, *rest = (OfferPart.unpack(frame) for frame in frames)
    offer = Offer(first)
    for part in rest:
        assert not offer.complete
        offer.add(part)
    assert offer.complete
    assert (offer.channel, offer.number) == (2**32 - 1, 5)
    assert offer.offsets.tolist() == [piece.offset for piece in pieces]
    assert offer.lengths.tolist() == [piece.length for piece in pieces]


GOOD = next(parts_of(1, 1, np.arange(3), np.arange(3))).pack()


@pytest.mark.parametrize("data", [b"", GOOD[:-1], GOOD[:20], b"x" + GOOD[1:], GOOD + b"12345678"])
def test_what_is_no_offer_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not an offer"):
        OfferPart.unpack(data)


def test_the_control_file_tells_which_connections_stand() -> None:
    control = ControlFile(IDENTITY)
    assert belongs_to(control.fd, IDENTITY)
    assert not belongs_to(control.fd, b"another1")
    last = (1 << 30) - 1
    for number in (1, last):
        assert not stands(control.fd, IDENTITY, number)
        control.set(number)
        assert stands(control.fd, IDENTITY, number)
    control.clear(1)
    assert not stands(control.fd, IDENTITY, 1)
    assert stands(control.fd, IDENTITY, last)
    control.close()


@pytest.mark.parametrize(
    ("environ", "private", "shared", "kind"),
    [
        ({}, "madvise", "never", "private"),
        ({}, "always", "never", "private"),
        ({}, "madvise", "advise", "shared"),
        ({}, "never", "always", "shared"),
        ({}, "never", "never", "shared"),
        ({}, "madvise", "deny", "private"),
        ({"PRELAY_POOL_MEMORY": "shared"}, "madvise", "never", "shared"),
        ({"PRELAY_POOL_MEMORY": "private"}, "never", "always", "private"),
        ({"PRELAY_POOL_MEMORY": "nonsense"}, "madvise", "never", "private"),
    ],
)
def test_the_pools_memory_follows_huge_pages(environ: dict[str, str], private: str, shared: str, kind: str) -> None:
    assert pool_kind(environ, private, shared) == kind


@pytest.mark.parametrize("kind", ["private", "shared"])
def test_the_pools_pages_are_there_from_the_start(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRELAY_POOL_MEMORY", kind)
    size = 5 << 20
    pool = np.frombuffer(pool_memory(size), np.uint8)
    resident = np.zeros(size // mmap.PAGESIZE, np.uint8)
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    assert mincore(pool.ctypes.data, size, resident.ctypes.data) == 0
    assert resident.all()
    assert not pool.any()


def test_the_setting_switches_off() -> None:
    assert shared_pools_allowed({})
    assert shared_pools_allowed({"PRELAY_SHARED_POOLS": "y"})
    assert not shared_pools_allowed({"PRELAY_SHARED_POOLS": "n"})
