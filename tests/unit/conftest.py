"""The unit tier starts no Ray and opens no connection: both raise here."""

import socket
import sys
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def nothing_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a unit test must not start Ray or use the network")

    for name in ("connect", "connect_ex", "bind"):
        monkeypatch.setattr(socket.socket, name, refuse)
    # Ray takes seconds to import, and a test that hasn't imported it can't start it.
    if "ray" in sys.modules:
        monkeypatch.setattr(sys.modules["ray"], "init", refuse)
