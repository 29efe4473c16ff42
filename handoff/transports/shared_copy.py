"""Copy an operation's pieces out of a peer's pool, a slice at a time. Two ways: from a mapping, or by the kernel.

The kernel's way (`process_vm_readv`, CMA) takes many pieces per call. It is as fast as memcpy where the pages are
huge; with small ones it isn't, since it pins each page. A mapping costs a call per piece, with the interpreter's lock
held for short ones: taking it again costs more than such a copy, up to 5 ms when other threads run Python.
"""

import ctypes
import os
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import numpy.typing as npt

SLICE_BYTES = 16 << 20
SLICE_PIECES = 1024
"""An operation is copied in slices of at most so much, and takes turns with others after each: 1 to 2 ms. So many
pieces the kernel takes in one call."""
LOCKED_BYTES = 1 << 20
"""Shorter pieces are copied from a mapping with the interpreter's lock held."""

Numbers = npt.NDArray[np.int64]
Copy = Callable[[Numbers, Numbers, Numbers], None]
"""(targets, sources, lengths): copies piece i, `lengths[i]` bytes, from address `sources[i]` to `targets[i]`; all int64
[pieces], at most SLICE_PIECES. Raises OSError when the source can't be read."""


def _memmove(library: ctypes.CDLL) -> Callable[[int, int, int], None]:
    function: Any = library.memmove
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = None
    return cast(Callable[[int, int, int], None], function)


_copy_locked = _memmove(ctypes.PyDLL(None))
_copy_unlocked = _memmove(ctypes.CDLL(None))
_readv = ctypes.CDLL(None, use_errno=True).process_vm_readv
_readv.restype = ctypes.c_ssize_t
_readv.argtypes = (ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong)


def copy_mapped(targets: Numbers, sources: Numbers, lengths: Numbers) -> None:
    """A `Copy` from what is mapped into this process."""
    copy = _copy_locked if int(lengths.max()) < LOCKED_BYTES else _copy_unlocked
    deque(map(copy, targets.tolist(), sources.tolist(), lengths.tolist()), maxlen=0)


def copy_from(pid: int) -> Copy:
    """A `Copy` from the memory of another process."""

    def copy(targets: Numbers, sources: Numbers, lengths: Numbers) -> None:
        count = len(lengths)
        here, there = np.stack((targets, lengths), 1), np.stack((sources, lengths), 1)  # As struct iovec is laid out.
        if _readv(pid, here.ctypes.data, count, there.ctypes.data, count, 0) != lengths.sum():
            code = ctypes.get_errno()
            raise OSError(code, f"process {pid} could not be read: {os.strerror(code)}")

    return copy


class PieceCopy:
    """One operation's copy. targets, sources, lengths: see Copy, of any number."""

    def __init__(self, targets: Numbers, sources: Numbers, lengths: Numbers) -> None:
        self._targets, self._sources, self._lengths = cut_long(targets, sources, lengths)
        self._ends = np.cumsum(self._lengths)
        self._next = 0

    @property
    def ended(self) -> bool:
        return self._next == len(self._lengths)

    def advance(self, copy: Copy) -> int:
        """Copy a slice; returns its bytes. Raises OSError as `copy` does."""
        first = self._next
        copied = int(self._ends[first - 1]) if first else 0
        end = int(np.searchsorted(self._ends, copied + SLICE_BYTES, "right"))
        self._next = end = min(max(end, first + 1), first + SLICE_PIECES)
        copy(self._targets[first:end], self._sources[first:end], self._lengths[first:end])
        return int(self._ends[end - 1]) - copied


def cut_long(targets: Numbers, sources: Numbers, lengths: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """The same bytes in the same order, in pieces of at most SLICE_BYTES."""
    parts = -(-lengths // SLICE_BYTES)
    if int(parts.max()) == 1:
        return targets, sources, lengths
    piece = np.repeat(np.arange(len(lengths)), parts)
    begin = (np.arange(len(piece)) - (np.cumsum(parts) - parts)[piece]) * SLICE_BYTES
    return targets[piece] + begin, sources[piece] + begin, np.minimum(lengths[piece] - begin, SLICE_BYTES)
