"""How a child process answers: one line on stdout, which it keeps to itself, since C libraries print there too."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def answer_of() -> Iterator[Callable[[bytes], None]]:
    """Inside, stdout is stderr; what is passed to the yielded function goes to the real stdout."""
    with os.fdopen(os.dup(1), "wb") as stdout:
        os.dup2(2, 1)

        def answer(line: bytes) -> None:
            stdout.write(line + b"\n")
            stdout.flush()

        yield answer
