"""Scatter a node's free blocks with ordinary commands: one sequence for each block, cancelled in random order."""

import time
from collections.abc import Sequence
from random import Random
from typing import Any

from cluster.handoff_bench.device import UNCHECKED
from handoff.node import Node
from scheduler.commands import (
    CancelDestination,
    CancelSource,
    Command,
    ReserveDestination,
    SubmitHandoffPrefill,
)
from scheduler.ids import HandoffId, RequestId
from scheduler.request import Request

TIMEOUT_S = 60.0
_LOOK_S = 0.01


def scatter(node: Node[Any], total_blocks: int, random: Random) -> None:
    """Afterwards the free blocks are handed out in random order. Raises TimeoutError.

    The node must own nothing, and allow as many handoffs as it has blocks.
    """
    is_source = node.role == "prefill"
    begin = SubmitHandoffPrefill if is_source else ReserveDestination
    cancel = CancelSource if is_source else CancelDestination
    names = [f"scatter-{number}" for number in range(total_blocks)]
    _apply(node, [begin(HandoffId(name), Request(RequestId(name), (UNCHECKED,), max_tokens=2)) for name in names])
    _wait(node, "held" if is_source else "reserved", total_blocks)
    random.shuffle(names)
    _apply(node, [cancel(HandoffId(name)) for name in names])
    _wait(node, "free", total_blocks)


def _apply(node: Node[Any], commands: Sequence[Command]) -> None:
    for future in [node.apply(command) for command in commands]:
        future.result(TIMEOUT_S)


def _wait(node: Node[Any], place: str, blocks: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while (found := node.status().result(TIMEOUT_S)["blocks"])[place] != blocks:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{found} after {TIMEOUT_S:.0f} s, expected {blocks} {place} blocks")
        time.sleep(_LOOK_S)
