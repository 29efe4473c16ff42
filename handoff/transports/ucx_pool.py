"""The registered pool as UCX buffers. UCX registers memory with a network card itself, on first use."""

from collections.abc import Callable
from typing import Any

from ucxx._lib.arr import Array

from handoff.transports.base import Piece


class _DeviceSpan:
    """Bytes of device memory; the pool that owns them outlives it."""

    __slots__ = ("__cuda_array_interface__",)

    def __init__(self, address: int, length: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (length,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def span_maker(pool: Any) -> Callable[[Piece], Any]:
    """A function from a piece to a ucxx Array over its bytes, without a copy."""
    interface = getattr(pool, "__cuda_array_interface__", None)
    if interface is None:
        return lambda piece: Array(pool[piece.offset : piece.offset + piece.length])
    base = interface["data"][0]
    return lambda piece: Array(_DeviceSpan(base + piece.offset, piece.length))


def make_device_current(pool: Any) -> None:
    """Make the CUDA context of a device pool current on this thread; nothing for host memory."""
    if not hasattr(pool, "__cuda_array_interface__"):
        return
    from ucxx._cuda_context import ensure_cuda_context

    device = getattr(pool, "device", None)
    index = getattr(device, "index", None)  # torch
    ensure_cuda_context(index if index is not None else getattr(device, "id", 0))  # cupy
