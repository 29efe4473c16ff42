"""Questions that a process of its own answers: it may crash, hang or load libraries, and the doctor goes on."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TypeVar

import msgspec

import cluster
from handoff.transports.ucx_probe import Probe

KILL_WAIT_S = 5.0
CLOSE_WAIT_S = 2.0

T = TypeVar("T")


class NoAnswer(RuntimeError):
    """The child died, took too long or said nonsense; the message says which, with its last words."""


def ask(module: str, kind: type[T], environ: Mapping[str, str], timeout_s: float) -> T:
    """What `python -m module` prints, as a `kind`. Raises NoAnswer."""
    with _child([module], environ) as child:
        return child.answer(kind, timeout_s)


def ask_probe(environ: Mapping[str, str], timeout_s: float) -> Probe:
    """Run both ends of `handoff.transports.ucx_probe`. Raises NoAnswer."""
    module = "handoff.transports.ucx_probe"
    left, right = socket.socketpair()
    with (
        _child([module, "source", str(left.fileno())], environ, left) as source,
        _child([module, "destination", str(right.fileno())], environ, right) as destination,
    ):
        try:
            probe = destination.answer(Probe, timeout_s)
        except NoAnswer as error:
            raise NoAnswer(f"{error} The other end: {source.last_words()}.") from None
        source.wait(CLOSE_WAIT_S)
        return probe


class _Child:
    def __init__(self, process: "subprocess.Popen[bytes]", words: IO[bytes]) -> None:
        self._process, self._words = process, words

    def answer(self, kind: type[T], timeout_s: float) -> T:
        try:
            line, _ = self._process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise NoAnswer(f"no answer within {timeout_s:.0f} s; its last words: {self.last_words()}.") from None
        if self._process.returncode:
            raise NoAnswer(f"the process ended with {self._process.returncode}: {self.last_words()}.")
        try:
            return msgspec.json.decode(line, type=kind)
        except msgspec.MsgspecError as error:
            raise NoAnswer(f"the process gave no proper answer: {error}.") from None

    def last_words(self) -> str:
        self._words.seek(0)
        lines = self._words.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip().rstrip(".") if lines else "none"

    def wait(self, timeout_s: float) -> None:
        """Let it end by itself for so long."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)

    def end(self) -> None:
        self._process.kill()
        self.wait(KILL_WAIT_S)
        if self._process.stdout is not None:
            self._process.stdout.close()


@contextmanager
def _child(command: Sequence[str], environ: Mapping[str, str], end: socket.socket | None = None) -> Iterator[_Child]:
    """A process that runs our module, until the block is left. end: a socket that it takes over."""
    home = str(Path(cluster.__file__).parents[1])
    path = os.pathsep.join(part for part in (home, environ.get("PYTHONPATH", "")) if part)
    # A file and no pipe: a child that writes much must not wait for a reader.
    with tempfile.TemporaryFile() as words:
        process = subprocess.Popen(
            # -P: a folder of the user's called handoff must not stand in for ours.
            [sys.executable, "-P", "-m", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=words,
            env={**environ, "PYTHONPATH": path},
            pass_fds=() if end is None else (end.fileno(),),
        )
        if end is not None:
            # Only the child holds it now, so that its death is seen at the other end.
            end.close()
        child = _Child(process, words)
        try:
            yield child
        finally:
            child.end()
