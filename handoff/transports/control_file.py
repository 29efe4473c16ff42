"""Which connections of a transport stand, in a file in memory that its peers on this machine read.

A peer that copies from our pool without our help must learn when we have given it up: from then on the pool's owner
uses that memory for something else. So a connection's byte is cleared before its operations end, and a peer that finds
it set after a copy knows that all bytes were in place until then. Numbers of connections are never used again, so
neither is a byte; the file is sparse.
"""

import fcntl
import os
from contextlib import suppress

_SET, _CLEAR = b"\1", b"\0"


class ControlFile:
    """Belongs to one transport. Raises OSError when there is no memory for it."""

    def __init__(self, identity: bytes) -> None:
        """identity: the transport's; a peer checks by it that it has opened the right file."""
        self._identity_bytes = len(identity)
        self.fd = os.memfd_create("prelay-control", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.pwrite(self.fd, identity, 0)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        except OSError:
            os.close(self.fd)
            raise

    def set(self, number: int) -> None:
        """The connection stands. Without memory for it the peer's receives fail, with PeerLost."""
        with suppress(OSError):
            self._write(number, _SET)

    def clear(self, number: int) -> None:
        """The connection is given up. Call this before any of its operations ends."""
        # Fails only where `set` has failed: its page is there.
        with suppress(OSError):
            self._write(number, _CLEAR)

    def close(self) -> None:
        os.close(self.fd)

    def _write(self, number: int, value: bytes) -> None:
        os.pwrite(self.fd, value, self._identity_bytes + number)


def belongs_to(fd: int, identity: bytes) -> bool:
    """fd: of what should be the control file of a transport with this identity."""
    return os.pread(fd, len(identity), 0) == identity


def stands(fd: int, identity: bytes, number: int) -> bool:
    """fd: of the peer's control file. number: the peer's, of its connection to us."""
    # A system call, not a load from a mapping: the copy's loads are over before the kernel reads the byte.
    return os.pread(fd, 1, len(identity) + number) == _SET
