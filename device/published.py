"""Folders that appear complete or not at all, also when several processes build the same one."""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from device.errors import ModelDownloadFailed

BUILD_WAIT_S = 1800.0
"""How long a process waits for another one that builds the same folder."""
_POLL_S = 0.1


def ensure_folder(parent: Path, name: str, build: Callable[[Path], None]) -> Path:
    """`parent/name`, made by `build(partial)` if absent: `partial` is an empty folder that becomes it by a rename.

    Whatever `build` raises passes through, and leaves nothing behind. Processes that arrive at the same time wait
    for the first one. Raises ModelDownloadFailed after BUILD_WAIT_S.
    """
    final = parent / name
    if final.is_dir():
        return final
    parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(parent / f".lock-{name}"):
        if not final.is_dir():
            _build_and_rename(final, build)
    return final


def _build_and_rename(final: Path, build: Callable[[Path], None]) -> None:
    prefix = f".partial-{final.name}-"
    for dead in final.parent.glob(f"{prefix}*"):
        shutil.rmtree(dead, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=prefix, dir=final.parent))
    try:
        build(partial)
        partial.chmod(0o755)
        partial.rename(final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """A lock that the kernel drops when its holder dies."""
    handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        deadline = time.monotonic() + BUILD_WAIT_S
        while not _try_lock(handle):
            if time.monotonic() > deadline:
                raise ModelDownloadFailed(f"another process has held {path} for {BUILD_WAIT_S:.0f} s; end it")
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(handle)


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
