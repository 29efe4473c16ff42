"""Where `prelay status` and `prelay chat` find a running server: a small file for each in Prelay's home."""

import json
import os
from pathlib import Path


class NoServer(RuntimeError):
    """No running server is known: start one with `prelay serve`, or name it with --url."""


def _folder(home: Path) -> Path:
    return home / "run"


def _own_file(home: Path) -> Path:
    return _folder(home) / f"{os.getpid()}.json"


def announce(home: Path, url: str) -> None:
    """Make this process's server findable."""
    path = _own_file(home)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"url": url}))
    partial.replace(path)


def withdraw(home: Path) -> None:
    """Remove this process's announcement."""
    _own_file(home).unlink(missing_ok=True)


def find(home: Path) -> str:
    """The URL of the newest running server. Raises NoServer. Removes what dead servers left."""
    for path in sorted(_folder(home).glob("*.json"), key=lambda p: p.stat().st_mtime_ns, reverse=True):
        if _is_alive(int(path.stem)):
            url: str = json.loads(path.read_text())["url"]
            return url
        path.unlink(missing_ok=True)
    raise NoServer("no running server found: start one with `prelay serve`, or name it with --url")


def find_any(home: Path) -> str | None:
    """As `find`; None if there is no running server."""
    try:
        return find(home)
    except NoServer:
        return None


def environ_of(home: Path, url: str) -> dict[str, str]:
    """What the server at `url` was started with; empty if it is not of this machine and user, or not known."""
    for path in _folder(home).glob("*.json"):
        if json.loads(path.read_text())["url"] == url:
            return _environ(int(path.stem))
    return {}


def _environ(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
