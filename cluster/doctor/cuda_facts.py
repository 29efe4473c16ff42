"""What the CUDA driver says. `python -m cluster.doctor.cuda_facts` prints it as JSON, from a process of its own.

Asked from the driver itself, which is all that has to be there: torch may be a build without CUDA.
"""

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from handoff.transports.child_answer import answer_of

_DMA_BUF_SUPPORTED = 124  # CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
_TRIAL_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class CudaFacts:
    """error: why there is no CUDA. driver: the kernel driver's version, empty if it isn't loaded. version: of CUDA.

    ipc_error: why GPU memory can't be opened to another process; empty if it can. dmabuf: of the first device.
    """

    error: str = ""
    driver: str = ""
    version: str = ""
    devices: tuple[str, ...] = ()
    dmabuf: bool = False
    ipc_error: str = ""


class _Failed(RuntimeError):
    """A call of the driver's failed."""


def read_cuda_facts() -> CudaFacts:
    driver = _driver()
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        _call(cuda, "cuInit", 0)
        devices = _devices(cuda)
    except (OSError, _Failed) as error:
        return CudaFacts(error=str(error), driver=driver)
    if not devices:
        return CudaFacts(error="the driver shows no device", driver=driver)
    return CudaFacts(
        driver=driver,
        version=_version(cuda),
        devices=tuple(_name(cuda, device) for device in devices),
        dmabuf=_attribute(cuda, _DMA_BUF_SUPPORTED, devices[0]) == 1,
        ipc_error=_ipc_error(cuda, devices[0]),
    )


def _call(cuda: Any, name: str, *arguments: Any) -> None:
    code = getattr(cuda, name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        cuda.cuGetErrorString(code, ctypes.byref(text))
        raise _Failed(f"{name}: {(text.value or b'unknown error').decode()} ({code})")


def _devices(cuda: Any) -> list[int]:
    count = ctypes.c_int()
    _call(cuda, "cuDeviceGetCount", ctypes.byref(count))
    handles = []
    for index in range(count.value):
        device = ctypes.c_int()
        _call(cuda, "cuDeviceGet", ctypes.byref(device), index)
        handles.append(device.value)
    return handles


def _name(cuda: Any, device: int) -> str:
    text = ctypes.create_string_buffer(128)
    _call(cuda, "cuDeviceGetName", text, len(text), device)
    return text.value.decode()


def _version(cuda: Any) -> str:
    number = ctypes.c_int()
    _call(cuda, "cuDriverGetVersion", ctypes.byref(number))
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def _attribute(cuda: Any, attribute: int, device: int) -> int:
    """0 for an attribute that an older driver doesn't know."""
    value = ctypes.c_int()
    try:
        _call(cuda, "cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
    except _Failed:
        return 0
    return value.value


def _ipc_error(cuda: Any, device: int) -> str:
    """Get an IPC handle of some memory, as UCX's cuda_ipc lane does. The process's end frees everything."""
    context, memory = ctypes.c_void_p(), ctypes.c_uint64()
    handle = ctypes.create_string_buffer(64)
    try:
        _call(cuda, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        _call(cuda, "cuCtxSetCurrent", context)
        _call(cuda, "cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(_TRIAL_BYTES))
        _call(cuda, "cuIpcGetMemHandle", handle, memory)
    except _Failed as error:
        return str(error)
    return ""


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    match = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text)
    return match[1] if match else "unknown"


def main() -> None:
    with answer_of() as answer:
        answer(msgspec.json.encode(read_cuda_facts()))


if __name__ == "__main__":
    main()
