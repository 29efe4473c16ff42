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
    CopyBlocks,
    Decode,
    DeviceError,
    DeviceFacts,
    Done,
    Draw,
    DropSequenceState,
    Effect,
    EffectOutcome,
    Exhausted,
    Fault,
    Quiesce,
    RestoreSequenceState,
    Row,
    Saved,
    SaveSequenceState,
    StepPlan,
    StepResult,
    Ticket,
)
from scheduler.ids import RequestId

Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"
Values: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

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
    fail_effects: ordinals of effects (from 0, Quiesce not counted) that raise DeviceError(EFFECT). They change
    nothing, but for a state that was to be restored or dropped: that is gone.
    spill_blocks: room for saved states, in blocks; None: any number.
    saved: the states in the spill store, as (tokens, content [blocks, block_size]). effects: all that were asked for.
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
        fail_effects: Collection[int] = (),
        spill_blocks: int | None = None,
    ) -> None:
        self.pool: Bytes = np.full(total_blocks * block_size * VALUE_BYTES, 0xA5, np.uint8)
        self.gate = Gate()
        self.fail_at = set(fail_at)
        self.fail_effects = set(fail_effects)
        self.spill_blocks = spill_blocks
        self.saved: dict[RequestId, tuple[int, Values]] = {}
        self.effects: list[Effect] = []
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
        self._pending: tuple[StepPlan, object, StepResult] | None = None
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
        self._pending = plan, _content(plan), StepResult(ticket, tokens)
        return ticket

    def await_result(self, ticket: Ticket) -> StepResult:
        assert self._pending is not None
        plan, content, result = self._pending
        assert result.ticket == ticket
        assert _content(plan) == content, "a row was changed while its step was in flight"
        self._pending = None
        return result

    def apply(self, effect: Effect) -> EffectOutcome:
        assert not self.is_torn_down
        if isinstance(effect, Quiesce):
            return Done()
        assert self._pending is None, f"{effect}: a step is in flight"
        ordinal = len(self.effects)
        self.effects.append(effect)
        self._check_effect(effect)
        if ordinal in self.fail_effects:
            if isinstance(effect, RestoreSequenceState | DropSequenceState):
                self.saved.pop(effect.request_id, None)
            raise DeviceError(Fault.EFFECT, f"effect {ordinal} was told to fail")
        return self._apply(effect)

    def teardown(self) -> None:
        self.is_torn_down = True

    def _check(self, plan: StepPlan) -> None:
        """What every plan must keep: tables cover the rows, and no position is written twice or read by its writer."""
        written: set[tuple[int, int]] = set()
        for row in plan.rows:
            assert 0 <= row.start < row.end, f"{row.request_id}: a row without tokens"
            assert row.end <= len(row.known), f"{row.request_id}: a row that goes beyond what is known"
            assert row.end <= len(row.blocks) * self._facts.block_size, f"{row.request_id}: the table is too short"
            assert len(set(row.blocks)) == len(row.blocks), f"{row.request_id}: a block twice in one table"
            assert all(0 <= block < self._facts.total_blocks for block in row.blocks)
            assert row.draw is None or row.end == len(row.known), f"{row.request_id}: a known token is drawn"
            assert row.request_id not in self.saved, f"{row.request_id}: it runs while it is spilled"
            slots = {self._slot(row, position) for position in range(row.start, row.end)}
            assert not slots & written, f"{row.request_id}: two rows write one position"
            written |= slots
        if isinstance(plan, Decode):
            assert all(row.count == 1 for row in plan.rows)
        assert plan.rows
        for row in plan.rows:
            past = {self._slot(row, position) for position in range(row.start)}
            assert not past & written, f"{row.request_id}: another row writes what this one reads"

    def _check_effect(self, effect: Effect) -> None:
        """What every effect must keep: blocks that exist, none written twice, and a store used as it was filled."""
        match effect:
            case CopyBlocks(pairs):
                targets = [target for _, target in pairs]
                assert len(set(targets)) == len(targets), f"{effect}: two copies write one block"
                assert all(source != target for source, target in pairs), f"{effect}: a copy onto itself"
                blocks = [block for pair in pairs for block in pair]
            case SaveSequenceState(request_id, table, tokens):
                assert request_id not in self.saved, f"{request_id}: saved already"
                self._check_table(request_id, table, tokens)
                blocks = list(table)
            case RestoreSequenceState(request_id, table, tokens):
                assert request_id in self.saved, f"{request_id}: restored, but not saved"
                assert tokens == self.saved[request_id][0], f"{request_id}: saved with another number of tokens"
                self._check_table(request_id, table, tokens)
                blocks = list(table)
            case _:
                assert isinstance(effect, DropSequenceState)
                blocks = []
        assert all(0 <= block < self._facts.total_blocks for block in blocks), f"{effect}: no such block"

    def _check_table(self, request_id: RequestId, table: Sequence[int], tokens: int) -> None:
        assert tokens > 0, f"{request_id}: a state without tokens"
        needed = -(-tokens // self._facts.block_size)
        assert len(table) == needed, f"{request_id}: {tokens} tokens in {len(table)} blocks"
        assert len(set(table)) == len(table), f"{request_id}: a block twice in one table"

    def _apply(self, effect: Effect) -> EffectOutcome:
        match effect:
            case CopyBlocks(pairs):
                for source, target in pairs:
                    self._values[target] = self._values[source]
            case SaveSequenceState(request_id, blocks, tokens):
                if self.spill_blocks is not None and self.saved_blocks + len(blocks) > self.spill_blocks:
                    return Exhausted()
                self.saved[request_id] = tokens, self._values[list(blocks)]
                return Saved(len(blocks) * self._facts.block_bytes)
            case RestoreSequenceState(request_id, blocks, _):
                self._values[list(blocks)] = self.saved.pop(request_id)[1]
            case DropSequenceState(request_id):
                self.saved.pop(request_id, None)
        return Done()

    @property
    def saved_blocks(self) -> int:
        return sum(len(content) for _, content in self.saved.values())

    def _slot(self, row: Row, position: int) -> tuple[int, int]:
        return row.blocks[position // self._facts.block_size], position % self._facts.block_size

    def _run(self, row: Row) -> int | None:
        previous = int(self._values[self._slot(row, row.start - 1)]) if row.start else _ROOT
        for position, token in enumerate(row.tokens, row.start):
            previous = mix(previous, token, position)
            self._values[self._slot(row, position)] = previous
        self.computed[row.request_id] = self.computed.get(row.request_id, 0) + row.count
        if row.draw is None:
            return None
        read = self._values[list(row.blocks)].reshape(-1)[: row.end]
        return draw(read, row.draw, self._facts.vocab_size)

    def _spoil(self, plan: StepPlan) -> None:
        for row in plan.rows:
            for position in range(row.start, row.end):
                self._values[self._slot(row, position)] = -1


def _content(plan: StepPlan) -> object:
    return [(row.start, row.end, list(row.known), list(row.blocks), row.draw) for row in plan.rows]


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
