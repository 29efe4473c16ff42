"""A device that owns a pool of host memory and computes nothing, to see what moving blocks costs.

A prompt is one number, repeated. UNCHECKED: what is in its blocks is what was there before. Any other is a seed:
prefilling it writes a pattern of that seed into its blocks, and its first decode step draws INTACT if they still hold
it, DAMAGED if not. So where the bytes went is told by an ordinary output of the destination.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from scheduler.adapters import AdapterFacts, AdapterRefused, LoraCommand
from scheduler.contract import DeviceError, DeviceFacts, DeviceIo, Fault, Row, StepPlan, StepResult
from scheduler.effects import Done, Effect, EffectOutcome, ReserveKv, Ticket

Bytes: TypeAlias = npt.NDArray[np.uint8]

BLOCK_SIZE = 16
"""Tokens in a block."""
UNCHECKED = 0
FIRST_TOKEN, INTACT, DAMAGED = 1, 2, 3
_WORD_BYTES = 8
_SPREAD = np.uint64(0x9E3779B97F4A7C15)


def pattern(seed: int, index: int, block_bytes: int) -> Bytes:
    """What the `index`-th block of a prompt of `seed` holds: no two words of one prompt are equal."""
    words = block_bytes // _WORD_BYTES
    numbers = np.arange(words, dtype=np.uint64) + np.uint64(index * words + (seed << 40))
    return (numbers * _SPREAD).view(np.uint8)


class BlockMover(DeviceIo):
    """pool: uint8 [total_blocks * block_bytes], touched, so that no transfer waits for the kernel to hand out memory.

    Depth 1: a step is over when it is launched.
    """

    def __init__(self, total_blocks: int, block_bytes: int, max_model_len: int) -> None:
        """Raises ValueError for blocks that are not whole words."""
        if block_bytes < _WORD_BYTES or block_bytes % _WORD_BYTES:
            raise ValueError(f"blocks of {block_bytes} bytes: choose a multiple of {_WORD_BYTES}")
        self.pool: Bytes = np.full(total_blocks * block_bytes, 0xA5, np.uint8)
        self._blocks = self.pool.reshape(total_blocks, block_bytes)
        self._launched = 0
        self._result: StepResult | None = None
        self._facts = DeviceFacts(
            model="none",
            model_digest="block-mover",
            device="cpu",
            attention="none",
            dtype="uint8",
            layers=1,
            kv_heads=1,
            head_dim=1,
            vocab_size=1 << 20,
            block_size=BLOCK_SIZE,
            total_blocks=total_blocks,
            block_bytes=block_bytes,
            max_model_len=max_model_len,
        )

    def facts(self) -> DeviceFacts:
        return self._facts

    def max_depth(self) -> int:
        return 1

    def launch(self, plan: StepPlan) -> Ticket:
        self._launched += 1
        ticket = Ticket(self._launched)
        self._result = StepResult(ticket, tuple(self._run(row) for row in plan.rows))
        return ticket

    def await_result(self, ticket: Ticket) -> StepResult:
        result, self._result = self._result, None
        if result is None or result.ticket != ticket:
            raise DeviceError(Fault.EFFECT, f"ticket {ticket} is not in flight")
        return result

    def apply(self, effect: Effect) -> EffectOutcome:
        """Nothing here runs ahead, is spilled or lives in slots."""
        if isinstance(effect, ReserveKv):
            raise DeviceError(Fault.UNSUPPORTED, "this device does not run ahead")
        return Done()

    def lora(self, command: LoraCommand) -> tuple[AdapterFacts, ...]:
        raise AdapterRefused("there is no model that could take an adapter")

    def teardown(self) -> None:
        """The pool is freed with this object: a late reader must not find the memory gone."""

    def _run(self, row: Row) -> int | None:
        seed = row.known[0]
        if row.start >= row.prompt_tokens:
            return INTACT if self._is_intact(seed, row.blocks, row.prompt_tokens) else DAMAGED
        if seed != UNCHECKED:
            for index in range(row.start // BLOCK_SIZE, -(-row.end // BLOCK_SIZE)):
                self._blocks[row.blocks[index]] = pattern(seed, index, self._facts.block_bytes)
        return None if row.draw is None else FIRST_TOKEN

    def _is_intact(self, seed: int, table: Sequence[int], prompt_tokens: int) -> bool:
        """Whether the blocks of the prompt hold its pattern. An unchecked prompt has none."""
        if seed == UNCHECKED:
            return True
        found: Any = (
            np.array_equal(self._blocks[table[index]], pattern(seed, index, self._facts.block_bytes))
            for index in range(-(-prompt_tokens // BLOCK_SIZE))
        )
        return all(found)
