"""A device without a model: it is an oracle for where KV goes.

Computing a token reads the value of the position before it through the block table, mixes it with the token, and
writes the result at its own position. The drawn token is a hash of every value from position 0 on, read back through
the block table. So a block that is wrong, stale, missing or another request's changes the output, and
`expected_output` says what it must be from the tokens alone.
"""

from collections.abc import Collection, Sequence
from hashlib import blake2b
from threading import Condition
from typing import Any, TypeAlias

import numpy as np

from scheduler.contract import (
    Decode,
    DeviceError,
    DeviceFacts,
    Draw,
    Effect,
    Fault,
    Quiesce,
    Row,
    StepPlan,
    StepResult,
    Ticket,
)

Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"

VALUE_BYTES = 8
GATE_TIMEOUT_S = 30.0
_MASK = (1 << 63) - 1
_ROOT = 0x5DEECE66D


class Gate:
    """Holds steps before they compute. Open at first."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._allowed: int | None = None
        self._waiting = False

    def hold(self, after_steps: int = 0) -> None:
        """Let `after_steps` more steps through, then hold each until `release`."""
        with self._changed:
            self._allowed = after_steps
            self._changed.notify_all()

    def release(self) -> None:
        with self._changed:
            self._allowed = None
            self._changed.notify_all()

    def wait_held(self, timeout_s: float) -> bool:
        """Wait until a step is held; False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._waiting, timeout_s)

    def enter(self) -> None:
        with self._changed:
            if self._allowed == 0:
                self._waiting = True
                self._changed.notify_all()
                released = self._changed.wait_for(lambda: self._allowed != 0, GATE_TIMEOUT_S)
                self._waiting = False
                if not released:
                    raise RuntimeError("a test held a step and never released it")
            if self._allowed:
                self._allowed -= 1


class KvMachine:
    """A `DeviceIo` over `pool`: uint8 [total_blocks * block_size * 8], which a transport may read and write.

    fail_at: ordinals of launched steps (from 0) that raise DeviceError after they wrote garbage.
    """

    def __init__(
        self,
        total_blocks: int,
        block_size: int,
        *,
        vocab_size: int = 1000,
        max_model_len: int = 4096,
        model_digest: str = "kv-machine",
        fail_at: Collection[int] = (),
    ) -> None:
        self.pool: Bytes = np.full(total_blocks * block_size * VALUE_BYTES, 0xA5, np.uint8)
        self.gate = Gate()
        self.fail_at = set(fail_at)
        self.steps = 0
        self.computed: dict[str, int] = {}
        self._values = self.pool.view(np.int64).reshape(total_blocks, block_size)
        self._facts = DeviceFacts(
            model="kv-machine",
            model_digest=model_digest,
            device="none",
            attention="none",
            dtype="int64",
            layers=1,
            kv_heads=1,
            head_dim=1,
            vocab_size=vocab_size,
            block_size=block_size,
            total_blocks=total_blocks,
            block_bytes=block_size * VALUE_BYTES,
            max_model_len=max_model_len,
        )
        self._pending: tuple[Ticket, StepResult] | None = None
        self.is_torn_down = False

    def facts(self) -> DeviceFacts:
        return self._facts

    def max_depth(self) -> int:
        return 1

    def launch(self, plan: StepPlan) -> Ticket:
        assert self._pending is None, "a step was launched before the last was settled"
        assert not self.is_torn_down
        self.gate.enter()
        ordinal, self.steps = self.steps, self.steps + 1
        self._check(plan)
        if ordinal in self.fail_at:
            self._spoil(plan)
            raise DeviceError(Fault.FORWARD, f"step {ordinal} was told to fail")
        ticket = Ticket(ordinal)
        tokens = tuple(self._run(row) for row in plan.rows)
        self._pending = ticket, StepResult(ticket, tokens)
        return ticket

    def await_result(self, ticket: Ticket) -> StepResult:
        assert self._pending is not None
        assert self._pending[0] == ticket
        result, self._pending = self._pending[1], None
        return result

    def apply(self, effect: Effect) -> None:
        assert isinstance(effect, Quiesce)

    def teardown(self) -> None:
        self.is_torn_down = True

    def _check(self, plan: StepPlan) -> None:
        """What every plan must keep: tables cover the rows, and no position is written twice or read by its writer."""
        written: set[tuple[int, int]] = set()
        for row in plan.rows:
            end = row.start + len(row.tokens)
            assert row.tokens, f"{row.request_id}: a row without tokens"
            assert end <= len(row.blocks) * self._facts.block_size, f"{row.request_id}: the block table is too short"
            assert len(set(row.blocks)) == len(row.blocks), f"{row.request_id}: a block twice in one table"
            assert all(0 <= block < self._facts.total_blocks for block in row.blocks)
            assert row.draw is None or row.draw.position == end
            slots = {self._slot(row, position) for position in range(row.start, end)}
            assert not slots & written, f"{row.request_id}: two rows write one position"
            written |= slots
        if isinstance(plan, Decode):
            assert all(len(row.tokens) == 1 for row in plan.rows)
        assert plan.rows
        for row in plan.rows:
            past = {self._slot(row, position) for position in range(row.start)}
            assert not past & written, f"{row.request_id}: another row writes what this one reads"

    def _slot(self, row: Row, position: int) -> tuple[int, int]:
        return row.blocks[position // self._facts.block_size], position % self._facts.block_size

    def _run(self, row: Row) -> int | None:
        previous = int(self._values[self._slot(row, row.start - 1)]) if row.start else _ROOT
        for position, token in enumerate(row.tokens, row.start):
            previous = mix(previous, token, position)
            self._values[self._slot(row, position)] = previous
        self.computed[row.request_id] = self.computed.get(row.request_id, 0) + len(row.tokens)
        if row.draw is None:
            return None
        end = row.start + len(row.tokens)
        read = self._values[list(row.blocks)].reshape(-1)[:end]
        return draw(read, row.draw, self._facts.vocab_size)

    def _spoil(self, plan: StepPlan) -> None:
        for row in plan.rows:
            for position in range(row.start, row.start + len(row.tokens)):
                self._values[self._slot(row, position)] = -1


def mix(previous: int, token: int, position: int) -> int:
    """The value of `token` at `position` after a position with the value `previous`."""
    return (previous * 6364136223846793005 + token * 1442695040888963407 + position * 0x9E3779B97F4A7C15 + 1) & _MASK


def draw(values: "np.ndarray[Any, np.dtype[np.int64]]", how: Draw, vocab_size: int) -> int:
    token = int.from_bytes(blake2b(values.tobytes(), digest_size=8).digest(), "little") % vocab_size
    while token in how.suppress:
        token = (token + 1) % vocab_size
    return token


def expected_output(prompt: Sequence[int], count: int, vocab_size: int = 1000) -> list[int]:
    """The `count` tokens that any correct run answers to `prompt`."""
    values: list[int] = []
    outputs: list[int] = []
    for position, token in enumerate(prompt):
        values.append(mix(values[-1] if values else _ROOT, token, position))
    while True:
        digest = blake2b(np.array(values, np.int64).tobytes(), digest_size=8).digest()
        outputs.append(int.from_bytes(digest, "little") % vocab_size)
        if len(outputs) == count:
            return outputs
        values.append(mix(values[-1], outputs[-1], len(values)))
