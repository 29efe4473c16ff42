"""Finding a running server by what it announced."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.running import NoServer, announce, environ_of, find, find_any, withdraw


def test_a_server_is_found_until_it_withdraws(tmp_path: Path) -> None:
    announce(tmp_path, "http://127.0.0.1:1")
    assert find(tmp_path) == "http://127.0.0.1:1"
    withdraw(tmp_path)
    with pytest.raises(NoServer, match="prelay serve"):
        find(tmp_path)


def test_an_older_server_is_found_when_the_newer_is_gone(tmp_path: Path) -> None:
    announce(tmp_path, "http://127.0.0.1:1")
    dead = tmp_path / "run" / "4194304.json"  # beyond the largest pid
    dead.write_text(json.dumps({"url": "http://127.0.0.1:2"}))
    os.utime(dead, (2e9, 2e9))
    assert find(tmp_path) == "http://127.0.0.1:1"
    assert not dead.exists()


def test_the_newest_running_server_wins(tmp_path: Path) -> None:
    announce(tmp_path, "http://127.0.0.1:1")
    newer = tmp_path / "run" / "1.json"
    newer.write_text(json.dumps({"url": "http://127.0.0.1:2"}))
    os.utime(newer, (2e9, 2e9))
    assert find(tmp_path) == "http://127.0.0.1:2"


def test_withdrawing_twice_is_harmless(tmp_path: Path) -> None:
    withdraw(tmp_path)
    announce(tmp_path, "http://127.0.0.1:1")
    withdraw(tmp_path)
    withdraw(tmp_path)


def test_without_a_server_there_is_none_to_find(tmp_path: Path) -> None:
    assert find_any(tmp_path) is None
    announce(tmp_path, "http://127.0.0.1:1")
    assert find_any(tmp_path) == "http://127.0.0.1:1"


def test_the_environment_of_a_server(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={"UCX_TLS": "a=b"}) as server:
        (tmp_path / "run" / f"{server.pid}.json").write_text(json.dumps({"url": "http://127.0.0.1:1"}))
        assert environ_of(tmp_path, "http://127.0.0.1:1") == {"UCX_TLS": "a=b"}
        assert environ_of(tmp_path, "http://127.0.0.1:2") == {}
        assert server.stdin is not None
        server.stdin.write(b"\n")
    (tmp_path / "run" / f"{server.pid}.json").rename(tmp_path / "run" / "4194304.json")
    assert environ_of(tmp_path, "http://127.0.0.1:1") == {}
