"""A node of its own process for `test_ucx_processes`: one JSON command per line in, one JSON answer per line out.

python ucx_node.py NAME POOL_BYTES SEED        (seed 0: a pool of zeros)
"""

import hashlib
import json
import os
import sys
import threading
import time
from typing import Any

import numpy as np

from device.host_memory import pool_memory
from handoff.transports.base import Piece, TransferError
from handoff.transports.ucx import UcxTransport


class Node:
    def __init__(self, name: str, pool_bytes: int, seed: int) -> None:
        self.pool = np.frombuffer(pool_memory(pool_bytes), np.uint8)
        if seed:
            self.pool[:] = np.random.default_rng(seed).integers(0, 256, pool_bytes, np.uint8)
        self.name = name
        self.transport = UcxTransport()
        self.outcomes: list[str] = []
        self.messages: list[str] = []
        self._changed = threading.Condition()
        self.transport.start(name, self.pool, self._on_message)

    def do(self, command: dict[str, Any]) -> Any:
        return getattr(self, "do_" + command.pop("do"))(**command)

    def do_address(self) -> str:
        return self.transport.address.hex()

    def do_connect(self, peer: str, address: str) -> None:
        self.transport.connect(peer, bytes.fromhex(address))

    def do_disconnect(self, peer: str) -> None:
        self.transport.disconnect(peer)

    def do_post(self, way: str, peer: str, channel: int, count: int, length: int) -> None:
        """Post `count` neighbouring pieces from the pool's beginning."""
        post = self.transport.post_send if way == "send" else self.transport.post_receive
        post(peer, channel, [Piece(index * length, length) for index in range(count)], self._done)

    def do_say(self, peer: str, text: str) -> None:
        self.transport.send_message(peer, text.encode())

    def do_outcomes(self, count: int, timeout_s: float) -> list[str]:
        """The names of the errors ("None" for success) that callbacks have got, once there are `count`."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.outcomes) >= count, timeout_s)
            return list(self.outcomes)

    def do_heard(self, count: int, timeout_s: float) -> list[str]:
        with self._changed:
            self._changed.wait_for(lambda: len(self.messages) >= count, timeout_s)
            return list(self.messages)

    def do_fill(self, value: int) -> None:
        self.pool[:] = value

    def do_digest(self, length: int) -> str:
        return hashlib.sha256(self.pool[:length].tobytes()).hexdigest()

    def do_written(self) -> int:
        return int(np.count_nonzero(self.pool))

    def do_links(self) -> list[list[str | None]]:
        return [[link.peer, link.lane, link.warning] for link in self.transport.links()]

    def do_cpu_share(self, seconds: float) -> float:
        """CPU time of the transport's thread over wall time."""
        (thread,) = [t for t in threading.enumerate() if t.name.startswith("ucx-")]
        clock = time.pthread_getcpuclockid(thread.ident or 0)
        wall, cpu = time.monotonic(), time.clock_gettime(clock)
        time.sleep(seconds)
        return (time.clock_gettime(clock) - cpu) / (time.monotonic() - wall)

    def do_close(self) -> None:
        self.transport.close()

    def _on_message(self, peer: str, frame: bytes) -> None:
        with self._changed:
            self.messages.append(f"{peer}: {frame.decode()}")
            self._changed.notify_all()

    def _done(self, error: TransferError | None) -> None:
        with self._changed:
            self.outcomes.append(type(error).__name__ if error else "None")
            self._changed.notify_all()


def main() -> None:
    # The answers keep stdout to themselves: UCX, in C, prints there too.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    node = Node(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    for line in sys.stdin:
        answers.write(json.dumps(node.do(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
