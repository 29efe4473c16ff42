"""Nodes with the UCX transport in processes of their own (`ucx_node.py`)."""

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "integration" / "ucx_node.py"
ANSWER_TIMEOUT_S = 60.0
OUTCOME_TIMEOUT_S = 20.0
POOL_BYTES = 256 << 20
WHOLE = {"count": 256, "length": 1 << 20}
BY_TCP = {"PRELAY_SHARED_POOLS": "n"}
LANES = {
    "cma": {"PRELAY_POOL_MEMORY": "private"},
    "shm": {"PRELAY_POOL_MEMORY": "shared"},
    "tcp": BY_TCP,
}
"""By lane: the environment that leads to it."""


class RemoteNode:
    def __init__(self, name: str, seed: int, environ: dict[str, str]) -> None:
        self.name = name
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("UCX_", "PRELAY_"))}
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), name, str(POOL_BYTES), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=inherited | {"PYTHONPATH": str(ROOT)} | environ,
        )

    def do(self, do: str, **arguments: Any) -> Any:
        self.tell(do, **arguments)
        return self.answer()

    def tell(self, do: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            assert selector.select(ANSWER_TIMEOUT_S), f"{self.name} does not answer"
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        self.process.kill()
        self.process.wait(ANSWER_TIMEOUT_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def join(left: RemoteNode, right: RemoteNode) -> None:
    """Connect both ways, and wait until each has heard the other."""
    addresses = {node.name: node.do("address") for node in (left, right)}
    left.do("connect", peer=right.name, address=addresses[right.name])
    right.do("connect", peer=left.name, address=addresses[left.name])
    heard = {node.name: len(node.do("heard", count=0, timeout_s=0)) for node in (left, right)}
    left.do("say", peer=right.name, text="ready")
    right.do("say", peer=left.name, text="ready")
    for node, peer in ((left, right), (right, left)):
        messages = node.do("heard", count=heard[node.name] + 1, timeout_s=OUTCOME_TIMEOUT_S)
        assert messages[heard[node.name] :] == [f"{peer.name}: ready"]


StartPair = Callable[..., tuple[RemoteNode, RemoteNode]]
StartNode = Callable[..., RemoteNode]


def move_whole_pool(source: RemoteNode, destination: RemoteNode) -> None:
    destination.do("post", way="receive", peer="source", channel=1, **WHOLE)
    source.do("post", way="send", peer="destination", channel=1, **WHOLE)
    assert destination.do("outcomes", count=1, timeout_s=OUTCOME_TIMEOUT_S)[-1] == "None"
    assert source.do("outcomes", count=1, timeout_s=OUTCOME_TIMEOUT_S)[-1] == "None"
    assert source.do("digest", length=POOL_BYTES) == destination.do("digest", length=POOL_BYTES)
