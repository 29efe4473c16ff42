"""A folder that belongs to one process and doesn't outlive it for long.

    parent/prelay-spill-x7k2.lock    locked by the process as long as it lives; the kernel drops the lock with it
    parent/prelay-spill-x7k2/        mode 0700; made after the lock is held, so no living process's folder is unlocked

A process that is killed leaves its folder behind. The next one to start in the same parent removes it, unread.
"""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import structlog

from device.errors import DeviceSetupError

PREFIX = "prelay-spill-"
_log = structlog.get_logger()


class OwnFolder:
    """A new folder inside `parent`, which is made if absent. Raises DeviceSetupError."""

    def __init__(self, parent: Path) -> None:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            _remove_dead(parent)
            self._lock, self._lock_path = _make(parent)
        except OSError as error:
            raise DeviceSetupError(f"no spill folder can be made in {parent}: {error}; give another one") from error
        self.path = self._lock_path.with_suffix("")

    def remove(self) -> None:
        """Remove the folder with all that is in it. What cannot be removed is left to the next start."""
        if self._lock < 0:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        _forget_lock(self.path, self._lock_path)
        os.close(self._lock)
        self._lock = -1


def _make(parent: Path) -> tuple[int, Path]:
    """A lock that is held, and the folder beside it."""
    handle, name = tempfile.mkstemp(prefix=PREFIX, suffix=".lock", dir=parent)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        Path(name).with_suffix("").mkdir(mode=0o700)
    except OSError:
        os.close(handle)
        Path(name).unlink()
        raise
    return handle, Path(name)


def _remove_dead(parent: Path) -> None:
    for lock in parent.glob(f"{PREFIX}*.lock"):
        folder = lock.with_suffix("")
        if folder.is_dir():
            with suppress(OSError):  # it is alive, or another user's, or another process removes it now
                _remove_if_dead(folder, lock)


def _remove_if_dead(folder: Path, lock: Path) -> None:
    handle = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _log.info("removing the spill folder of a dead process", folder=str(folder))
        shutil.rmtree(folder, ignore_errors=True)
        _forget_lock(folder, lock)
    finally:
        os.close(handle)


def _forget_lock(folder: Path, lock: Path) -> None:
    """The lock is how a folder is found again, so it stays as long as there is one."""
    if not folder.exists():
        with suppress(OSError):
            lock.unlink()
