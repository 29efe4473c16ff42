"""Pools in shared memory: find out that a pool is one, tell peers where it is, map a peer's pool.

A pool is shared when it lies in one shared mapping of a file in memory (memfd) that can't shrink, and this process has
a descriptor of that file. A peer on this machine opens the descriptor through /proc, which needs the same user and PID
namespace, but no right to trace; it maps the pool for reading, and needs this process no more to read it.
"""

import fcntl
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from handoff.transports.control_file import ControlFile, belongs_to, stands
from handoff.transports.ucx_wire import PoolPlace

SETTING = "PRELAY_SHARED_POOLS"
"""Set to n in the environment: peers' pools are not mapped, and ours is not offered for it."""

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


def shared_bytes(size: int) -> mmap.mmap:
    """`size` zeros as a pool to be shared; they live as long as the object. Raises OSError."""
    fd = os.memfd_create("prelay-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)


def find_place(pool: Any, control: ControlFile) -> PoolPlace | None:
    """What a peer must know to map our pool; None if it is not shared."""
    if not isinstance(pool, np.ndarray):
        return None
    region = region_in(Path("/proc/self/maps").read_text(), pool.ctypes.data, pool.nbytes)
    fd = _descriptor_of(region) if region else None
    if region is None or fd is None:
        return None
    return PoolPlace(os.getpid(), fd, region.device, region.inode, region.offset, pool.nbytes, control.fd)


class PeerPool:
    """A peer's pool, mapped for reading. Raises OSError or ValueError when it can't be mapped."""

    def __init__(self, place: PoolPlace, identity: bytes) -> None:
        self._identity = identity
        folder = os.open(f"/proc/{place.pid}/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # Both through one folder, so both are of the process whose control file proves that it is the peer.
            self._control = os.open(str(place.control_fd), os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
            try:
                if not belongs_to(self._control, identity):
                    raise ValueError(f"process {place.pid} is another here: different PID namespaces?")
                self.bytes = _map(folder, place)
            except BaseException:
                os.close(self._control)
                raise
        finally:
            os.close(folder)

    def stands(self, number: int) -> bool:
        """The peer has not given up its connection `number` to us."""
        return stands(self._control, self._identity, number)

    def close(self) -> None:
        """Unmaps: nobody may hold a view of `bytes`."""
        os.close(self._control)
        del self.bytes


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
