"""The spill stores: what is put comes back exactly, or not at all."""

import errno
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rows import TINY_FACTS

from device.errors import DeviceSetupError
from device.kv_pool import Bytes
from device.spill import HostStore, SpillStore, open_store
from device.spill_disk import DiskStore
from scheduler.contract import DeviceError, Fault
from scheduler.ids import RequestId

FACTS = replace(TINY_FACTS, model_digest="abcd", slots=2, slot_bytes=64)
A, B = RequestId("a"), RequestId("b")
TOKENS, SIZE = 9, 96
HEAD = struct.Struct("<8sHI")


def content(seed: int = 0, size: int = SIZE) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def files(parent: Path) -> list[Path]:
    return sorted(path for path in parent.rglob("*") if path.is_file() and path.suffix != ".lock")


@pytest.fixture(params=["host", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SpillStore]:
    opened = open_store(10_000, tmp_path / "spill" if request.param == "disk" else None, FACTS)
    yield opened
    opened.close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskStore]:
    opened = open_store(10_000, tmp_path, FACTS)
    assert isinstance(opened, DiskStore)
    yield opened
    opened.close()


def refused(action: Callable[[], Any]) -> str:
    """What the error says that `action` must end in."""
    with pytest.raises(DeviceError) as caught:
        action()
    assert caught.value.fault is Fault.EFFECT
    return str(caught.value)


def test_a_content_comes_back_once(store: SpillStore) -> None:
    size = store.put(A, TOKENS, content(1))
    assert size is not None
    assert size >= SIZE
    assert store.put(B, TOKENS, content(2)) == size
    assert store.holds(A)
    assert np.array_equal(store.take(A, TOKENS, SIZE), content(1))
    assert not store.holds(A)
    assert "a: no state of it is saved" in refused(lambda: store.take(A, TOKENS, SIZE))
    assert np.array_equal(store.take(B, TOKENS, SIZE), content(2))


def test_a_request_may_be_put_again_after_it_was_taken_or_dropped(store: SpillStore) -> None:
    store.put(A, TOKENS, content(1))
    store.take(A, TOKENS, SIZE)
    store.put(A, 5, content(2, 64))
    store.drop(A)
    store.put(A, 1, content(3, 32))
    assert np.array_equal(store.take(A, 1, 32), content(3, 32))


def test_dropping_twice_and_closing_twice_is_harmless(store: SpillStore) -> None:
    store.put(A, TOKENS, content())
    for _ in range(2):
        store.drop(A)
        assert not store.holds(A)
    refused(lambda: store.take(A, TOKENS, SIZE))
    store.close()
    store.close()


@pytest.mark.parametrize(("tokens", "size"), [(TOKENS - 1, SIZE), (TOKENS, SIZE - 32), (TOKENS, SIZE + 32)])
def test_another_count_or_size_is_refused_and_the_state_is_gone(store: SpillStore, tokens: int, size: int) -> None:
    store.put(A, TOKENS, content())
    assert str(TOKENS) in (message := refused(lambda: store.take(A, tokens, size))) or str(SIZE) in message
    assert not store.holds(A)


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_the_limit_counts_what_is_held(kind: str, tmp_path: Path) -> None:
    probe = open_store(10_000, tmp_path if kind == "disk" else None, FACTS)
    size = probe.put(A, TOKENS, content())
    assert size is not None
    probe.close()
    store = open_store(2 * size, tmp_path if kind == "disk" else None, FACTS)
    names = [RequestId(name) for name in "abc"]
    for leave in (lambda: store.drop(A), lambda: store.take(A, TOKENS, SIZE), lambda: store.take(A, 1, 1)):
        assert [store.put(name, TOKENS, content()) for name in names] == [size, size, None]
        assert not store.holds(names[2])
        assert not store.has_room(SIZE)
        try:
            leave()
        except DeviceError:
            assert not store.holds(A)
        assert store.has_room(SIZE)
        store.drop(B)
    assert [store.put(name, TOKENS, content()) for name in names] == [size, size, None]
    store.close()
    assert not files(tmp_path)


def test_nothing_fits_into_no_bytes_and_no_folder_is_made(tmp_path: Path) -> None:
    for parent in (None, tmp_path / "spill"):
        store = open_store(0, parent, FACTS)
        assert isinstance(store, HostStore)
        assert not store.has_room(SIZE)
        assert store.put(A, TOKENS, content()) is None
        assert not store.holds(A)
    assert not list(tmp_path.iterdir())


def test_a_negative_limit_is_a_setup_error() -> None:
    with pytest.raises(DeviceSetupError, match="-1 bytes"):
        open_store(-1, None, FACTS)


def test_files_are_private_and_end_with_the_store(disk: DiskStore, tmp_path: Path) -> None:
    name = RequestId("../../" + "ü" * 300)
    disk.put(name, TOKENS, content())
    disk.put(B, TOKENS, content(1))
    assert [path.suffix for path in files(tmp_path)] == [".kv", ".kv"]
    (folder,) = {path.parent for path in files(tmp_path)}
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o777 == 0o700
    assert np.array_equal(disk.take(name, TOKENS, SIZE), content())
    assert len(files(tmp_path)) == 1
    disk.close()
    assert not list(tmp_path.iterdir())


def damaged(disk: DiskStore, parent: Path, damage: Callable[[Path], None]) -> str:
    """What is said about a file after `damage`; it must be gone then."""
    disk.put(A, TOKENS, content())
    (path,) = files(parent)
    damage(path)
    message = refused(lambda: disk.take(A, TOKENS, SIZE))
    assert str(path) in message
    assert not files(parent)
    assert not disk.holds(A)
    return message


def written(data: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(data)

    return write


@pytest.fixture
def file(disk: DiskStore, tmp_path: Path) -> bytes:
    """The file of A's state."""
    disk.put(A, TOKENS, content())
    data = files(tmp_path)[0].read_bytes()
    disk.drop(A)
    return data


def test_every_byte_of_a_file_is_checked(disk: DiskStore, tmp_path: Path, file: bytes) -> None:
    for i in range(len(file)):
        for bit in (0x01, 0x80):
            damaged(disk, tmp_path, written(file[:i] + bytes([file[i] ^ bit]) + file[i + 1 :]))
    assert disk.put(A, TOKENS, content()) == len(file)
    assert np.array_equal(disk.take(A, TOKENS, SIZE), content())


def test_the_header_says_what_was_put_and_on_what(file: bytes) -> None:
    _, _, length = HEAD.unpack_from(file)
    body = msgspec.msgpack.decode(file[HEAD.size : HEAD.size + length])
    assert isinstance(body.pop("checksum"), int)
    assert body == {
        "request_id": A,
        "tokens": TOKENS,
        "size": SIZE,
        "block_bytes": FACTS.block_bytes,
        "slot_bytes": FACTS.slot_bytes,
        "dtype": FACTS.dtype,
        "model_digest": FACTS.model_digest,
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_id", "b"),
        ("tokens", 10),
        ("size", 97),
        ("block_bytes", 33),
        ("slot_bytes", 65),
        ("dtype", "bf16"),
        ("model_digest", "abce"),
        ("checksum", None),
    ],
)
def test_a_wrong_header_field_is_named(
    disk: DiskStore, tmp_path: Path, file: bytes, field: str, value: str | int | None
) -> None:
    magic, version, length = HEAD.unpack_from(file)
    body = msgspec.msgpack.decode(file[HEAD.size : HEAD.size + length])
    body[field] = body[field] ^ 1 if value is None else value
    head = msgspec.msgpack.encode(body)
    assert len(head) == length
    changed = HEAD.pack(magic, version, length) + head + file[HEAD.size + length :]
    assert field in damaged(disk, tmp_path, written(changed))


@pytest.mark.parametrize(("prefix", "word"), [((b"prelayKV", 2), "begins with"), ((b"prelaykv", 1), "version 1")])
def test_another_format_is_named(
    disk: DiskStore, tmp_path: Path, file: bytes, prefix: tuple[bytes, int], word: str
) -> None:
    (length,) = HEAD.unpack_from(file)[2:]
    assert word in damaged(disk, tmp_path, written(HEAD.pack(*prefix, length) + file[HEAD.size :]))


def test_a_file_of_another_length_is_refused(disk: DiskStore, tmp_path: Path, file: bytes) -> None:
    for length in range(len(file)):
        assert f"{length} bytes long" in damaged(disk, tmp_path, written(file[:length]))
    assert f"{len(file) + 1} bytes long" in damaged(disk, tmp_path, written(file + b"x"))


def test_a_missing_file_is_refused(disk: DiskStore, tmp_path: Path) -> None:
    assert "No such file" in damaged(disk, tmp_path, Path.unlink)
    assert disk.put(A, TOKENS, content()) is not None


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_no_room(disk: DiskStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    disk.put(B, TOKENS, content(1))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", failing(code))
        assert disk.put(A, TOKENS, content()) is None
    assert not disk.holds(A)
    assert len(files(tmp_path)) == 1
    assert disk.put(A, TOKENS, content()) is not None
    assert np.array_equal(disk.take(B, TOKENS, SIZE), content(1))


def failing(code: int) -> Callable[..., None]:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def test_a_failing_write_is_an_error_with_the_path_and_leaves_nothing(
    disk: DiskStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", failing(errno.EIO))
        message = refused(lambda: disk.put(A, TOKENS, content()))
    assert f"a: {tmp_path}" in message
    assert os.strerror(errno.EIO) in message
    assert not disk.holds(A)
    assert not files(tmp_path)


def test_a_folder_that_was_taken_away_is_an_error(disk: DiskStore, tmp_path: Path) -> None:
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    shutil.rmtree(folder)
    assert str(folder) in refused(lambda: disk.put(A, TOKENS, content()))
    disk.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("leave", [lambda store: store.drop(A), lambda store: store.take(A, TOKENS, SIZE)])
def test_a_file_that_cannot_be_removed_is_an_error_and_stays_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leave: Callable[[SpillStore], object]
) -> None:
    store = open_store(300, tmp_path, FACTS)
    assert store.put(A, TOKENS, content()) is not None
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", failing(errno.EACCES))
        message = refused(lambda: leave(store))
    assert f"a: {files(tmp_path)[0]} cannot be removed" in message
    assert not store.holds(A)
    assert store.put(A, TOKENS, content()) is None
    store.close()
    assert not list(tmp_path.iterdir())
