"""Where the state of preempted sequences waits until they run again: their blocks' bytes, then their slot's record."""

from pathlib import Path
from typing import Protocol

from device.errors import DeviceSetupError
from device.kv_pool import Bytes
from device.spill_disk import DiskStore
from device.spill_folder import OwnFolder
from scheduler.contract import DeviceError, DeviceFacts, Fault
from scheduler.ids import RequestId


class SpillStore(Protocol):
    """Contents by request, up to a limit in bytes. What fails is a DeviceError(EFFECT)."""

    def holds(self, request_id: RequestId) -> bool: ...

    def has_room(self, size: int) -> bool:
        """Whether a content of `size` bytes is worth reading from the device; `put` has the last word."""
        ...

    def put(self, request_id: RequestId, tokens: int, content: Bytes) -> int | None:
        """Keep `content`, which the caller gives away. Returns the bytes that it takes up, None for no room."""
        ...

    def take(self, request_id: RequestId, tokens: int, size: int) -> Bytes:
        """What was put, all `size` bytes of it, for `tokens` tokens. Raises if that is not what is there.

        The request is forgotten either way.
        """
        ...

    def drop(self, request_id: RequestId) -> None:
        """Forget the request; nothing happens if it isn't held."""
        ...

    def close(self) -> None:
        """Forget everything. May be called twice; nothing else may follow."""
        ...


def open_store(limit: int, parent: Path | None, facts: DeviceFacts) -> SpillStore:
    """A store for `limit` bytes: files in a folder of its own inside `parent`, or host memory if that is None.

    limit: 0 for a store that has room for nothing, and makes no folder. Raises DeviceSetupError.
    """
    if limit < 0:
        raise DeviceSetupError(f"{limit} bytes for spilled KV: give 0 for none, or how many")
    if parent is None or limit == 0:
        return HostStore(limit)
    return DiskStore(limit, OwnFolder(parent), facts)


class HostStore:
    """See SpillStore. In host memory, so without checksums."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._saved: dict[RequestId, tuple[int, Bytes]] = {}

    def holds(self, request_id: RequestId) -> bool:
        return request_id in self._saved

    def has_room(self, size: int) -> bool:
        return self._used + size <= self._limit

    def put(self, request_id: RequestId, tokens: int, content: Bytes) -> int | None:
        if not self.has_room(content.nbytes):
            return None
        self._saved[request_id] = tokens, content
        self._used += content.nbytes
        return content.nbytes

    def take(self, request_id: RequestId, tokens: int, size: int) -> Bytes:
        saved = self._forget(request_id)
        if saved is None:
            raise DeviceError(Fault.EFFECT, f"{request_id}: no state of it is saved")
        own_tokens, content = saved
        if (own_tokens, content.nbytes) != (tokens, size):
            raise DeviceError(
                Fault.EFFECT,
                f"{request_id}: saved are {own_tokens} tokens in {content.nbytes} bytes, not {tokens} in {size}",
            )
        return content

    def drop(self, request_id: RequestId) -> None:
        self._forget(request_id)

    def close(self) -> None:
        self._saved.clear()
        self._used = 0

    def _forget(self, request_id: RequestId) -> tuple[int, Bytes] | None:
        saved = self._saved.pop(request_id, None)
        if saved is not None:
            self._used -= saved[1].nbytes
        return saved
