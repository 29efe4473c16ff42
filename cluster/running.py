"""Where `prelay status` and `prelay chat` find a running server: a small file in Prelay's home."""

import json
import os
from contextlib import suppress
from pathlib import Path


class NoServer(RuntimeError):
    """No running server is known: start one with `prelay serve`, or name it with --url."""


def _file(home: Path) -> Path:
    return home / "run" / "server.json"


def announce(home: Path, url: str) -> None:
    """The newest server wins."""
    path = _file(home)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps({"url": url, "pid": os.getpid()}))
    partial.replace(path)


def withdraw(home: Path) -> None:
    """Remove this process's announcement."""
    with suppress(OSError, ValueError):
        path = _file(home)
        if json.loads(path.read_text())["pid"] == os.getpid():
            path.unlink()


def find(home: Path) -> str:
    """The URL of the running server. Raises NoServer."""
    try:
        record = json.loads(_file(home).read_text())
        os.kill(record["pid"], 0)
    except (OSError, ValueError, KeyError):
        raise NoServer("no running server found: start one with `prelay serve`, or name it with --url") from None
    url: str = record["url"]
    return url
