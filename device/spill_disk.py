"""A spill store of files, one per sequence.

    magic 8 | version 2 | header length 4 | header (MessagePack) | the blocks' bytes | the slot's record

A file is written under another name and renamed. It is read back whole, and handed out only if every field of the
header is what this process would write now and the bytes have the header's checksum.
"""

import errno
import os
import struct
import zlib
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from device.kv_pool import Bytes
from device.spill_folder import OwnFolder
from scheduler.contract import DeviceError, DeviceFacts, Fault
from scheduler.ids import RequestId

MAGIC = b"prelaykv"
VERSION = 2
_PREFIX = struct.Struct("<8sHI")
_FULL = {errno.ENOSPC, errno.EDQUOT}


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """size: of the blocks' bytes and the slot's record, which takes the last slot_bytes. checksum: their CRC-32."""

    request_id: str
    tokens: int
    size: int
    block_bytes: int
    slot_bytes: int
    dtype: str
    model_digest: str
    checksum: int


class _Damaged(Exception):
    """A file is not what was written, or not what is asked for."""


class DiskStore:
    """See SpillStore. The limit counts whole files; a disk that is full before that has no room either."""

    def __init__(self, limit: int, folder: OwnFolder, facts: DeviceFacts) -> None:
        self._limit = limit
        self._folder = folder
        self._facts = facts
        self._used = 0
        self._files = 0
        self._saved: dict[RequestId, tuple[Path, int]] = {}

    def holds(self, request_id: RequestId) -> bool:
        return request_id in self._saved

    def has_room(self, size: int) -> bool:
        return self._used + size <= self._limit

    def put(self, request_id: RequestId, tokens: int, content: Bytes) -> int | None:
        head = _encode(self._header(request_id, tokens, content.nbytes, zlib.crc32(content.data)))
        size = len(head) + content.nbytes
        if not self.has_room(size):
            return None
        path = self._folder.path / f"{self._files}.kv"  # numbered: a request's id may be no file name
        self._files += 1
        try:
            _write(path, head, content)
        except OSError as error:
            if error.errno in _FULL:
                return None
            raise DeviceError(Fault.EFFECT, f"{request_id}: {path} cannot be written: {error}") from error
        self._saved[request_id] = path, size
        self._used += size
        return size

    def take(self, request_id: RequestId, tokens: int, size: int) -> Bytes:
        saved = self._saved.get(request_id)
        if saved is None:
            raise DeviceError(Fault.EFFECT, f"{request_id}: no state of it is saved")
        path, file_size = saved
        try:
            return _read(path, file_size, self._header(request_id, tokens, size, checksum=0))
        except (_Damaged, OSError) as error:
            raise DeviceError(Fault.EFFECT, f"{request_id}: {path} cannot be restored: {error}") from error
        finally:
            self.drop(request_id)

    def drop(self, request_id: RequestId) -> None:
        saved = self._saved.pop(request_id, None)
        if saved is None:
            return
        path, size = saved
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            # Its bytes stay counted: the file still takes up room.
            raise DeviceError(Fault.EFFECT, f"{request_id}: {path} cannot be removed: {error}") from error
        self._used -= size

    def close(self) -> None:
        self._saved.clear()
        self._folder.remove()

    def _header(self, request_id: RequestId, tokens: int, size: int, checksum: int) -> _Header:
        facts = self._facts
        return _Header(
            request_id=request_id,
            tokens=tokens,
            size=size,
            block_bytes=facts.block_bytes,
            slot_bytes=facts.slot_bytes,
            dtype=facts.dtype,
            model_digest=facts.model_digest,
            checksum=checksum,
        )


def _encode(header: _Header) -> bytes:
    body = msgspec.msgpack.encode(header)
    return _PREFIX.pack(MAGIC, VERSION, len(body)) + body


def _write(path: Path, head: bytes, content: Bytes) -> None:
    partial = path.with_suffix(".partial")
    try:
        with partial.open("xb") as file:
            file.write(head)
            file.write(content.data)
        partial.rename(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def _read(path: Path, file_size: int, expected: _Header) -> Bytes:
    """What was put. expected: the header but for its checksum. Raises _Damaged, OSError."""
    with path.open("rb") as file:
        found = os.fstat(file.fileno()).st_size
        if found != file_size:
            raise _Damaged(f"{found} bytes long, {file_size} were written")
        header = _read_header(file)
        for name in _Header.__struct_fields__:
            got, wanted = getattr(header, name), getattr(expected, name)
            if name != "checksum" and got != wanted:
                raise _Damaged(f"its {name} is {got!r}, not {wanted!r}")
        content: Bytes = np.empty(header.size, np.uint8)
        if file.readinto(content.data) != header.size:
            raise _Damaged("it ends early")
    if zlib.crc32(content.data) != header.checksum:
        raise _Damaged("its bytes do not have their checksum")
    return content


def _read_header(file: BinaryIO) -> _Header:
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size:
        raise _Damaged("it ends early")
    magic, version, length = _PREFIX.unpack(prefix)
    if magic != MAGIC or version != VERSION:
        raise _Damaged(f"it begins with {magic!r} and version {version}, not {MAGIC!r} and {VERSION}")
    try:
        return msgspec.msgpack.decode(file.read(length), type=_Header)
    except msgspec.MsgspecError as error:
        raise _Damaged(f"its header cannot be read: {error}") from error
