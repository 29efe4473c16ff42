"""A real `prelay serve` in a process of its own, and what tests ask of it."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Served:
    """A running server. process: the command; its children are Ray and our actors."""

    url: str
    process: "subprocess.Popen[str]"
    home: Path

    def status(self) -> dict[str, Any]:
        response = httpx.get(f"{self.url}/cluster/status", timeout=60, trust_env=False)
        response.raise_for_status()
        document: dict[str, Any] = response.json()
        return document

    def owned_blocks(self) -> int:
        """Blocks that some request owns, over all nodes."""
        states = ("held", "reserved", "active", "draining")
        return sum(node["blocks"][state] for node in self.status()["nodes"] for state in states)

    def family(self) -> list[psutil.Process]:
        """The command and every process under it."""
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def command(self, *arguments: str) -> str:
        """The output of a `prelay` command about this server."""
        result = subprocess.run(
            [prelay(), *arguments, "--url", self.url],
            capture_output=True,
            text=True,
            timeout=120,
            env=environment(self.home),
            check=True,
        )
        return result.stdout


def prelay() -> str:
    return str(Path(sys.executable).with_name("prelay"))


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "PRELAY_HOME": str(home), "COLUMNS": "120"}


def pools(nodes: int = 1, kv_mib: int = 512) -> dict[str, dict[str, int]]:
    """Settings of both pools. kv_mib: a node faults its pool in when it starts, so no more than a test needs."""
    return {role: {"nodes": nodes, "kv_mib": kv_mib} for role in ("prefill", "decode")}


@contextmanager
def serve(home: Path, settings: dict[str, Any]) -> Iterator[Served]:
    """Start `prelay serve` with these settings on a free port; stop it with SIGTERM on the way out."""
    config = home / f"serve-{time.monotonic_ns()}.yaml"
    config.write_text(yaml.safe_dump({"port": 0, **settings}))
    process = subprocess.Popen(
        [prelay(), "serve", "--config", str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(home),
        start_new_session=True,
    )
    try:
        yield Served(_address(process), process, home)
    finally:
        stop(process)


def stop(process: "subprocess.Popen[str]") -> float:
    """Send SIGTERM; the seconds until the command ended. One that doesn't end is killed, and that is a failure."""
    started = time.monotonic()
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return time.monotonic() - started


def _address(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    deadline = time.monotonic() + START_TIMEOUT_S
    lines: list[str] = []
    while time.monotonic() < deadline and process.poll() is None:
        if not select.select([process.stdout], [], [], 1.0)[0]:
            continue
        line = process.stdout.readline()
        lines.append(line)
        if " on http://" in line:
            return line.split(" on ")[1].strip()
    raise AssertionError("the server did not start:\n" + "".join(lines))


def wait_until(condition: Callable[[], bool], timeout_s: float) -> float:
    """Seconds until `condition()` held. Raises AssertionError after `timeout_s`."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, f"not so after {timeout_s} s"
        time.sleep(0.02)
    return time.monotonic() - started
