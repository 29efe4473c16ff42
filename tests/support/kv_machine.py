"""A device without a model: it is an oracle for where KV goes.

Computing a token reads the value of the position before it through the block table, mixes it with the token, and
writes the result at its own position. The drawn token is a hash of every value from position 0 on, read back through
the block table. So a block that is wrong, stale, missing or another request's changes the output, and
`expected_output` says what it must be from the tokens alone.

At depth 2 a step computes when it is launched, and what it drew is kept back until it is awaited.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeAlias

import numpy as np
from gate import Gate
from slot_oracle import RECORD_BYTES, Record, SlotOracle
from split_values import SplitValues, Values

from scheduler.contract import Decode, DecodeFed, DeviceError, DeviceFacts, Draw, Fault, Row, StepPlan, StepResult
from scheduler.effects import (
    CopyBlocks,
    Done,
    DropSequenceState,
    Effect,
    EffectOutcome,
    Exhausted,
    Quiesce,
    Reserved,
    ReserveKv,
    RestoreSequenceState,
    Rollback,
    Saved,
    SaveSequenceState,
    SyncSecondary,
    Ticket,
)
from scheduler.ids import BlockId, RequestId

Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"

VALUE_BYTES = 8
_MASK = (1 << 63) - 1
_ROOT = 0x5DEECE66D


@dataclass(slots=True)
class _InFlight:
    """A launched step. rows: as they were then, for a fed step with the token that it was fed."""

    plan: StepPlan
    rows: list[Row]
    result: StepResult
    fails: bool

    def check_unchanged(self) -> None:
        """A step's rows stay as they are until it is settled. Those of a fed one move on once, with the step before it,
        and in no row may what is computed become another's: tables grow, and nothing else."""
        for row, then in zip(self.plan.rows, self.rows, strict=True):
            name = row.request_id
            assert list(row.blocks[: len(then.blocks)]) == then.blocks, f"{name}: its table was changed in flight"
            if isinstance(self.plan, DecodeFed):
                booked = row.known[then.start : then.end]
                assert list(booked) in ([], [then.known[-1]]), f"{name}: it was fed a token that it did not keep"
            else:
                now = (row.start, row.end, list(row.known), row.draw)
                assert now == (then.start, then.end, then.known, then.draw), f"{name}: it was changed in flight"


class KvMachine:
    """A `DeviceIo` over `pool`: uint8 [total_blocks * block_size * 8 + staging_bytes], which a transport may read and
    write. Its blocks are laid out like those of an fp32 model with one layer and one head of one dimension.
    values: what they hold.

    slots, snapshots, recurrent: see SlotOracle.
    depth: how many steps may be in flight. newest_first: of two steps the later one completes first.
    fail_at: ordinals of launched steps (from 0) that raise DeviceError after they wrote garbage.
    fail_awaits: ordinals of launched steps whose results are lost.
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
        slots: int = 0,
        snapshots: int = 0,
        recurrent: bool = False,
        depth: int = 1,
        newest_first: bool = False,
        fail_at: Collection[int] = (),
        fail_awaits: Collection[int] = (),
        fail_effects: Collection[int] = (),
        spill_blocks: int | None = None,
        staging_bytes: int = 0,
    ) -> None:
        kv_bytes = total_blocks * block_size * VALUE_BYTES
        self.pool: Bytes = np.full(kv_bytes + staging_bytes, 0xA5, np.uint8)
        self.values = SplitValues(self.pool[:kv_bytes], block_size)
        self.gate = Gate()
        self.fail_at = set(fail_at)
        self.fail_awaits = set(fail_awaits)
        self.fail_effects = set(fail_effects)
        self.spill_blocks = spill_blocks
        self.slots = SlotOracle(slots, snapshots, recurrent)
        self.saved: dict[RequestId, tuple[int, Values]] = {}
        self._saved_records: dict[RequestId, Record | None] = {}
        self.effects: list[Effect] = []
        self.steps = 0
        self.computed: dict[str, int] = {}
        self._facts = DeviceFacts(
            model="kv-machine",
            model_digest=model_digest,
            device="none",
            attention="none",
            dtype="fp32",
            layers=1,
            kv_heads=1,
            head_dim=1,
            vocab_size=vocab_size,
            block_size=block_size,
            total_blocks=total_blocks,
            block_bytes=block_size * VALUE_BYTES,
            max_model_len=max_model_len,
            slots=slots,
            slot_bytes=RECORD_BYTES if recurrent else 0,
            snapshots=snapshots,
            first_staging=kv_bytes,
            staging_bytes=staging_bytes,
        )
        self._depth = depth
        self._newest_first = newest_first
        self._in_flight: list[_InFlight] = []
        self._done: dict[Ticket, _InFlight] = {}
        self._pending_reservations: dict[RequestId, tuple[BlockId, ...]] = {}
        self._failed_reservations: dict[RequestId, tuple[BlockId, ...]] = {}
        self._reservations: dict[RequestId, tuple[BlockId, ...]] = {}
        self.is_torn_down = False

    def facts(self) -> DeviceFacts:
        return self._facts

    def max_depth(self) -> int:
        return self._depth

    @property
    def steps_in_flight(self) -> int:
        return len(self._in_flight) + len(self._done)

    def launch(self, plan: StepPlan) -> Ticket:
        limit = self._depth if isinstance(plan, DecodeFed) else 1
        assert self.steps_in_flight < limit, "a step was launched before the last was settled"
        assert not self.is_torn_down
        if self._depth == 1:
            self.gate.enter()
        ordinal, self.steps = self.steps, self.steps + 1
        rows = self._fed_rows(plan) if isinstance(plan, DecodeFed) else [_copy(row) for row in plan.rows]
        self._check(plan, rows)
        if ordinal in self.fail_at:
            self._spoil(rows)
            self._failed_reservations = self._pending_reservations
            self._pending_reservations = {}
            raise DeviceError(Fault.FORWARD, f"step {ordinal} was told to fail")
        self._take_reservations(plan)
        ticket = Ticket(ordinal)
        result = StepResult(ticket, tuple(self._run(row) for row in rows))
        self._in_flight.append(_InFlight(plan, rows, result, ordinal in self.fail_awaits))
        return ticket

    def await_result(self, ticket: Ticket) -> StepResult:
        if self._depth > 1:
            self.gate.enter()
        while ticket not in self._done:
            assert self._in_flight, f"ticket {ticket} is not in flight"
            done = self._in_flight.pop(-1 if self._newest_first else 0)
            self._done[done.result.ticket] = done
        step = self._done.pop(ticket)
        step.check_unchanged()
        if step.fails:
            raise DeviceError(Fault.READBACK, f"the result of step {ticket} was told to be lost")
        return step.result

    def _fed_rows(self, plan: DecodeFed) -> list[Row]:
        """The rows with the tokens that the step in flight drew for them."""
        unsettled = [*self._in_flight, *self._done.values()]
        assert len(unsettled) == 1, "a fed step without a step in flight"
        before = unsettled[0]
        drawn = {row.request_id: token for row, token in zip(before.rows, before.result.tokens, strict=True)}
        order = [row.request_id for row in before.rows]
        places = [order.index(row.request_id) for row in plan.rows]
        assert places == sorted(places), "the rows of a fed step stand in another order"
        rows = []
        for row, draw in zip(plan.rows, plan.draws, strict=True):
            token = drawn[row.request_id]
            assert token is not None, f"{row.request_id}: fed by a row without a draw"
            assert row.end == len(row.known), f"{row.request_id}: fed, but its next token is known"
            rows.append(_copy(row, [*row.known, token], row.end, draw))
        return rows

    def _take_reservations(self, plan: StepPlan) -> None:
        """What was reserved is of the fed step now; a step that is not fed begins anew."""
        reserved, self._pending_reservations = self._pending_reservations, {}
        if not isinstance(plan, DecodeFed):
            assert not reserved, f"reserved for a step that is not fed: {reserved}"
            self._reservations = {}
            self._failed_reservations = {}
            return
        for row in plan.rows:
            blocks = self._reservations[row.request_id] = reserved.pop(row.request_id, ())
            assert not blocks or tuple(row.blocks[-len(blocks) :]) == blocks, f"{row.request_id}: reserved elsewhere"
        assert not reserved, f"reserved, but not in the fed step: {reserved}"

    def apply(self, effect: Effect) -> EffectOutcome:
        assert not self.is_torn_down
        if isinstance(effect, Quiesce | SyncSecondary):
            return Done()
        assert not self.steps_in_flight or isinstance(effect, ReserveKv), f"{effect}: a step is in flight"
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

    def _check(self, plan: StepPlan, rows: Sequence[Row]) -> None:
        """What every plan must keep: tables cover the rows, and no position is written twice or read by its writer."""
        written: set[tuple[int, int]] = set()
        for row in rows:
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
            assert all(row.count == 1 for row in rows)
        assert rows
        for row in rows:
            past = {self._slot(row, position) for position in range(row.start)}
            assert not past & written, f"{row.request_id}: another row writes what this one reads"
            self.slots.check(row)

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
            case ReserveKv(request_id, table):
                assert request_id not in self._pending_reservations, f"{request_id}: reserved twice"
                blocks = list(table)
            case Rollback(request_id):
                known = (*self._failed_reservations, *self._reservations)
                assert request_id in known, f"{request_id}: no fed step of it to roll back"
                blocks = []
            case _:
                blocks = []
        assert all(0 <= block < self._facts.total_blocks for block in blocks), f"{effect}: no such block"

    def _check_table(self, request_id: RequestId, table: Sequence[int], tokens: int) -> None:
        assert tokens > 0, f"{request_id}: a state without tokens"
        needed = -(-tokens // self._facts.block_size)
        assert len(table) == needed, f"{request_id}: {tokens} tokens in {len(table)} blocks"
        assert len(set(table)) == len(table), f"{request_id}: a block twice in one table"

    def _apply(self, effect: Effect) -> EffectOutcome:
        if self.slots.apply(effect):
            return Done()
        match effect:
            case CopyBlocks(pairs):
                for source, target in pairs:
                    self.values[target] = self.values[source]
            case SaveSequenceState(request_id, blocks, tokens, slot):
                if self.spill_blocks is not None and self.saved_blocks + len(blocks) > self.spill_blocks:
                    return Exhausted()
                self._saved_records[request_id] = self.slots.saved(slot, tokens)
                self.saved[request_id] = tokens, self.values[list(blocks)]
                return Saved(len(blocks) * self._facts.block_bytes)
            case RestoreSequenceState(request_id, blocks, _, slot):
                self.values[list(blocks)] = self.saved.pop(request_id)[1]
                self.slots.restored(slot, self._saved_records[request_id])
            case DropSequenceState(request_id):
                self.saved.pop(request_id, None)
            case ReserveKv(request_id, blocks):
                self._pending_reservations[request_id] = blocks
                return Reserved(blocks)
            case Rollback(request_id):
                failed = self._failed_reservations.pop(request_id, None)
                return Reserved(self._reservations.pop(request_id) if failed is None else failed)
            case _:
                raise AssertionError(f"unknown effect {effect}")
        return Done()

    @property
    def saved_blocks(self) -> int:
        return sum(len(content) for _, content in self.saved.values())

    def _slot(self, row: Row, position: int) -> tuple[int, int]:
        return row.blocks[position // self._facts.block_size], position % self._facts.block_size

    def _run(self, row: Row) -> int | None:
        if not row.start:
            previous = _ROOT
        elif self.slots.recurrent:
            previous = self.slots.value(row)
        else:
            previous = int(self.values[self._slot(row, row.start - 1)])
        for position, token in enumerate(row.tokens, row.start):
            previous = mix(previous, token, position)
            self.values[self._slot(row, position)] = previous
        self.slots.computed(row, previous)
        self.computed[row.request_id] = self.computed.get(row.request_id, 0) + row.count
        if row.draw is None:
            return None
        read = self.values[list(row.blocks)].reshape(-1)[: row.end]
        return draw(read, row.draw, self._facts.vocab_size)

    def _spoil(self, rows: Sequence[Row]) -> None:
        for row in rows:
            for position in range(row.start, row.end):
                self.values[self._slot(row, position)] = -1


def _copy(row: Row, known: list[int] | None = None, start: int | None = None, draw: Draw | None = None) -> Row:
    """The row as it is now. With `known` one that computes these from `start` on, and draws with `draw`."""
    blocks = list(row.blocks)
    if known is None or start is None:
        return Row(row.request_id, list(row.known), row.start, row.end, blocks, row.draw, row.slot)
    return Row(row.request_id, known, start, len(known), blocks, draw, row.slot)


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
