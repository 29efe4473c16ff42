"""Host memory for the pool, of a kind that peers on this machine read as fast as memcpy.

Two kinds: private memory, which the kernel copies for a peer (CMA), and a file in memory, which a peer maps. Huge pages
decide: with small ones the kernel spends as much on pinning as on copying. So private memory where the system gives it
huge pages; the file where it gives them to files, or to nobody.

The pages are there from the start: a virtual machine may take milliseconds for the first touch of a huge page, which
handoffs would wait for, and a machine that lacks the memory says so before it serves.
"""

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import structlog

log = structlog.get_logger()

SETTING = "PRELAY_POOL_MEMORY"
"""In the environment: private or shared, to have that kind whatever the system says."""
KINDS = ("private", "shared")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
_MADV_POPULATE_WRITE = 23
"""Linux 5.14; Python's mmap doesn't know it, and would keep the interpreter while the kernel clears the pages."""
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def pool_memory(size: int) -> mmap.mmap:
    """`size` zeros of the kind that suits this system; private where a file can't be had, which is logged.

    Raises OSError when there is no room.
    """
    kind = pool_kind(os.environ, _chosen("enabled"), _chosen("shmem_enabled"))
    if kind == "shared":
        try:
            return _in_place(shared_memory(size))
        except OSError as error:
            log.warning("no shared memory for the pool, so it is private", error=str(error))
    return _in_place(private_memory(size))


def pool_kind(environ: Mapping[str, str], private_pages: str, shared_pages: str) -> str:
    """ "private" or "shared". private_pages, shared_pages: whom the system gives huge pages: "never", "madvise", ..."""
    if environ.get(SETTING) in KINDS:
        return environ[SETTING]
    if shared_pages in ("always", "within_size", "advise", "force"):
        return "shared"
    return "private" if private_pages in ("always", "madvise") else "shared"


def private_memory(size: int) -> mmap.mmap:
    """`size` zeros. Raises OSError when there is no room."""
    return _with_huge_pages(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def shared_memory(size: int) -> mmap.mmap:
    """`size` zeros in a file that goes away with its last mapping. Raises OSError when there is no room."""
    fd = os.memfd_create("prelay-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        # A peer that reads behind the end of a file is killed, so peers map only what can't shrink.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        # The object keeps a descriptor of its own, by which the transport finds the file.
        return _with_huge_pages(mmap.mmap(fd, size))
    finally:
        os.close(fd)


def _with_huge_pages(memory: mmap.mmap) -> mmap.mmap:
    with suppress(OSError):  # Only advice, and the kernel may be built without.
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _in_place(memory: mmap.mmap) -> mmap.mmap:
    """With all its pages. Raises OSError when there is no memory for them."""
    address = np.frombuffer(memory, np.uint8).ctypes.data
    if _madvise(address, len(memory), _MADV_POPULATE_WRITE) != 0:
        code = ctypes.get_errno()
        if code != errno.EINVAL:  # An older kernel gives the pages at their first touch.
            raise OSError(code, f"no memory for a pool of {len(memory) >> 20} MiB: {os.strerror(code)}")
    return memory


def _chosen(name: str) -> str:
    """The word in brackets, such as never in "always madvise [never]"; never where the kernel has no huge pages."""
    try:
        return (_HUGE_PAGES / name).read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return "never"
