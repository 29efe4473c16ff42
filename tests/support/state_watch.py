"""Watches a router of a hybrid model: each position is consumed once, and what is restored is the sequence's own.

The counts are kept by `SlotOracle` and compared with those that the device keeps in its records. States are compared
bit by bit with what the device held when the sequence's last step had ended, not with what was saved.
"""

from dataclasses import dataclass
from typing import Any

import torch
from slot_oracle import Record, SlotOracle
from torch import Tensor

from device.kv_pool import KvPool
from device.recorded_router import RecordingRouter
from scheduler.contract import Row, StepPlan, StepResult
from scheduler.effects import (
    Effect,
    EffectOutcome,
    ReleaseSeq,
    RestoreSequenceState,
    SaveSequenceState,
    SsmSnapshotRestore,
    Ticket,
)
from scheduler.ids import RequestId


@dataclass(frozen=True, slots=True)
class State:
    """A sequence's, after `tokens` tokens. record: its slot's. kv: its blocks' content."""

    tokens: int
    slot: int
    blocks: tuple[int, ...]
    record: Tensor
    kv: Tensor


@dataclass(frozen=True, slots=True)
class Spilled:
    """place: its row among the `rows` of the step before. moved: it came back in another slot and other blocks."""

    request_id: RequestId
    place: int
    rows: int
    moved: bool = False


class StateWatch(RecordingRouter):
    """inner: a sync or async router. spilled, restored: in the order in which they were. snapshots: times restored."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.pool: KvPool = inner.pool
        facts = inner.facts()
        self.oracle = SlotOracle(facts.slots, facts.snapshots, recurrent=True)
        self.spilled: list[Spilled] = []
        self.restored: list[Spilled] = []
        self.snapshots = 0
        self._states: dict[RequestId, State] = {}
        self._rows: dict[Ticket, tuple[Row, ...]] = {}
        self._last: tuple[Row, ...] = ()

    def launch(self, plan: StepPlan) -> Ticket:
        for row in plan.rows:
            self.oracle.check(row)
            assert self.count(row.slot) == row.start or row.start == 0, f"{row.request_id}: the device counts otherwise"
        ticket = super().launch(plan)
        for row in plan.rows:
            self.oracle.computed(row, 0)
        self._rows[ticket] = self._last = plan.rows
        return ticket

    def await_result(self, ticket: Ticket) -> StepResult:
        result = super().await_result(ticket)
        for row in self._rows.pop(ticket):
            state = self._state(row.end, row.slot, row.blocks)
            assert self.count(row.slot) == row.end
            self._states[row.request_id] = state
        return result

    def apply(self, effect: Effect) -> EffectOutcome:
        if isinstance(effect, SaveSequenceState):
            self.oracle.saved(effect.slot, effect.tokens)
            order = [row.request_id for row in self._last]
            self.spilled.append(Spilled(effect.request_id, order.index(effect.request_id), len(order)))
        outcome = super().apply(effect)
        self.oracle.apply(effect)
        match effect:
            case ReleaseSeq(_, slot):
                assert self.count(slot) == 0
            case SsmSnapshotRestore():
                self.snapshots += 1
            case RestoreSequenceState():
                self._require_own(effect)
        return outcome

    def count(self, slot: int) -> int:
        """How many tokens the state in `slot` has seen, as its record says."""
        return int(self.pool.slot_memory[slot][:8].view(torch.int64))

    def _state(self, tokens: int, slot: int, blocks: Any) -> State:
        own = tuple(blocks[: -(-tokens // self.facts().block_size)])
        return State(tokens, slot, own, self.pool.slot_memory[slot].clone(), self.pool.tensor[list(own)].clone())

    def _require_own(self, effect: RestoreSequenceState) -> None:
        before, now = self._states[effect.request_id], self._state(effect.tokens, effect.slot, effect.blocks)
        self.oracle.records[effect.slot] = Record(effect.tokens, 0)
        assert now.tokens == before.tokens, f"{effect.request_id}: it had {before.tokens} tokens, {now.tokens} are back"
        assert torch.equal(now.record, before.record), f"{effect.request_id}: the state that is back is not its own"
        assert torch.equal(now.kv, before.kv), f"{effect.request_id}: the KV that is back is not its own"
        moved = now.slot != before.slot and now.blocks != before.blocks
        spilled = next(s for s in reversed(self.spilled) if s.request_id == effect.request_id)
        self.restored.append(Spilled(spilled.request_id, spilled.place, spilled.rows, moved))
