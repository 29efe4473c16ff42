"""Host memory for the pool, shared so that a transport on this machine can let its peers map it.

A file in memory, mapped; it can't shrink, since a peer that reads behind the end of a file is killed. It goes away with
its last mapping.
"""

import fcntl
import mmap
import os
from contextlib import suppress

import structlog
import torch
from torch import Tensor

log = structlog.get_logger()


def shared_zeros(size: int) -> Tensor:
    """Zeros, uint8 [size], in shared memory; in private memory where the system has none, which is logged."""
    try:
        memory = _map_file(size)
    except (OSError, ValueError) as error:
        log.warning("the pool is private memory, so peers on this machine can't map it", error=str(error))
        return torch.zeros(size, dtype=torch.uint8)
    with suppress(OSError):  # Only advice, which this kernel may not know.
        memory.madvise(mmap.MADV_HUGEPAGE)
    # The tensor keeps the mapping, and that keeps a descriptor, by which the transport finds the file.
    return torch.frombuffer(memory, dtype=torch.uint8)


def _map_file(size: int) -> mmap.mmap:
    fd = os.memfd_create("prelay-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)
