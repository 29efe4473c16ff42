"""Pools that peers on the same machine read by themselves: tell them where ours is, reach a peer's pool.

A pool in shared memory lies in one shared mapping of a file in memory (memfd) that can't shrink, and its process has a
descriptor of that file. A peer opens the descriptor through /proc, which needs the same user and PID namespace, but no
right to trace; it maps the pool for reading. A pool in private memory is read by the kernel (CMA), with that right.
"""

import ctypes
import fcntl
import mmap
import os
import select
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from handoff.transports.control_file import ControlFile, belongs_to, stands
from handoff.transports.shared_copy import Copy, copy_from, copy_mapped
from handoff.transports.ucx_wire import PoolPlace

SETTING = "PRELAY_SHARED_POOLS"
"""Set to n in the environment: we don't read peers' pools by ourselves, nor do they read ours."""

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Region:
    """A pool in a file: what `fstat` says of the file, and where the pool begins in it, in bytes."""

    device: int
    inode: int
    offset: int


def shared_pools_allowed(environ: Mapping[str, str]) -> bool:
    return environ.get(SETTING, "y").lower() not in ("n", "no", "0")


def region_in(maps: str, address: int, size: int) -> Region | None:
    """Where `size` bytes from `address` on lie. maps: /proc/self/maps. None if not in one shared mapping of a memfd."""
    for line in maps.splitlines():
        span, access, offset, device, inode, *name = line.split(maxsplit=5)
        start, end = (int(bound, 16) for bound in span.split("-"))
        if not start <= address < end:
            continue
        if address + size > end or access[3] != "s" or not (name and name[0].startswith("/memfd:")):
            return None
        major, minor = (int(number, 16) for number in device.split(":"))
        return Region(os.makedev(major, minor), int(inode), int(offset, 16) + address - start)
    return None


def find_place(pool: Bytes, control: ControlFile) -> PoolPlace:
    """What a peer must know to reach our pool."""
    address = pool.ctypes.data
    region = region_in(Path("/proc/self/maps").read_text(), address, pool.nbytes)
    fd = _descriptor_of(region) if region else None
    if region is None or fd is None:
        # Where Yama restricts tracing to descendants, this lets other processes of the user read ours.
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
        return PoolPlace(os.getpid(), control.fd, address, pool.nbytes)
    return PoolPlace(os.getpid(), control.fd, address, pool.nbytes, fd, region.device, region.inode, region.offset)


class PeerPool:
    """A peer's pool within reach. Raises OSError or ValueError when it is not.

    base, size: addresses for `copy`, in bytes: of the mapping, or in the peer's process.
    """

    def __init__(self, place: PoolPlace, identity: bytes) -> None:
        self.size = place.size
        self._identity = identity
        self._mapping: Bytes | None = None
        self._process = os.pidfd_open(place.pid)
        self._control = -1
        try:
            folder = os.open(f"/proc/{place.pid}/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                # All through one folder, so all is of the process whose control file proves that it is the peer.
                self._control = os.open(str(place.control_fd), os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
                if not belongs_to(self._control, identity):
                    raise ValueError(f"process {place.pid} is another here: different PID namespaces?")
                self.base, self.copy = self._reach(folder, place)
            finally:
                os.close(folder)
        except BaseException:
            self.close()
            raise

    def stands(self, number: int) -> bool:
        """The peer has not given up its connection `number` to us; what was copied until now was in place."""
        return self._is_right_process() and stands(self._control, self._identity, number)

    def close(self) -> None:
        for fd in (self._process, self._control):
            if fd >= 0:
                os.close(fd)
        self._mapping = None

    def _reach(self, folder: int, place: PoolPlace) -> tuple[int, Copy]:
        if place.is_file:
            self._mapping = _map(folder, place)
            return self._mapping.ctypes.data, copy_mapped
        copy, byte = copy_from(place.pid), np.zeros(1, np.uint8)
        one = np.ones(1, np.int64)
        copy(byte.ctypes.data * one, place.address * one, one)  # Are we allowed to?
        return place.address, copy

    def _is_right_process(self) -> bool:
        """A mapping stays what it is. The number of a process that has ended may name another one."""
        if self._mapping is not None:
            return True
        ended = select.poll()
        ended.register(self._process, select.POLLIN)
        return not ended.poll(0)


def _descriptor_of(region: Region) -> int | None:
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.stat(f"/proc/self/fd/{name}")
        except OSError:
            continue  # Closed since, by another thread or by listdir itself.
        if (status.st_dev, status.st_ino) == (region.device, region.inode):
            return int(name)
    return None


def _map(folder: int, place: PoolPlace) -> Bytes:
    fd = os.open(str(place.fd), os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) != (place.device, place.inode):
            raise ValueError(f"descriptor {place.fd} of process {place.pid} is not the pool any more")
        # Reading behind the end of a file that was cut off kills a process.
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK or place.offset + place.size > status.st_size:
            raise ValueError("the pool's file is shorter than the pool, or may be shortened")
        before = place.offset % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(fd, before + place.size, prot=mmap.PROT_READ, offset=place.offset - before)
        return np.frombuffer(mapped, np.uint8, place.size, before)
    finally:
        os.close(fd)
