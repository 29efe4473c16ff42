"""The recurrent state of a device without a model: it must see each token once, in order, and never another's.

A slot holds how many tokens its state has seen, and the value that `KvMachine` computed for the last of them. So a
state that was lost, doubled, mixed up or taken at another length is noticed by the row that goes on from it.
"""

from dataclasses import dataclass

from scheduler.contract import Row
from scheduler.effects import (
    CompactSlot,
    DetachSlot,
    Effect,
    MarconiCheckpoint,
    ReleaseSeq,
    SsmSnapshotRestore,
    SsmSnapshotSave,
)

RECORD_BYTES = 16


@dataclass(frozen=True, slots=True)
class Record:
    """tokens: how many the state has seen. value: the state."""

    tokens: int
    value: int


CLEAN = Record(0, 0)


class SlotOracle:
    """recurrent: whether rows need slots."""

    def __init__(self, slots: int, snapshots: int, recurrent: bool) -> None:
        self.recurrent = recurrent
        self.records = [CLEAN] * slots
        self.snapshots: list[Record | None] = [None] * snapshots

    def check(self, row: Row) -> None:
        """A row that is about to run goes on where the state in its slot ends."""
        if not self.recurrent:
            return
        assert row.slot >= 0, f"{row.request_id}: it has no slot"
        record = self.records[row.slot]
        assert record.tokens == row.start, f"{row.request_id}: from {row.start}, its state has seen {record.tokens}"

    def value(self, row: Row) -> int:
        return self.records[row.slot].value

    def computed(self, row: Row, value: int) -> None:
        if self.recurrent:
            self.records[row.slot] = Record(row.end, value)

    def apply(self, effect: Effect) -> bool:
        """False if the effect is none of slots."""
        match effect:
            case ReleaseSeq(_, slot):
                self.records[slot] = CLEAN
            case CompactSlot(_, slot, target):
                assert self.records[target] == CLEAN, f"{effect}: slot {target} is in use"
                self.records[target], self.records[slot] = self.records[slot], CLEAN
            case DetachSlot():
                pass
            case MarconiCheckpoint(request_id, slot, tokens, snapshot):
                seen = self.records[slot].tokens
                assert seen == tokens, f"{request_id}: a checkpoint at {tokens}, its state has seen {seen}"
                self.snapshots[snapshot] = self.records[slot]
            case SsmSnapshotSave(_, slot, snapshot):
                self.snapshots[snapshot] = self.records[slot]
            case SsmSnapshotRestore(request_id, slot, snapshot):
                record = self.snapshots[snapshot]
                assert record is not None, f"{request_id}: snapshot {snapshot} is empty"
                self.records[slot] = record
            case _:
                return False
        return True

    def saved(self, slot: int, tokens: int) -> Record | None:
        """The record that is spilled with `tokens` tokens of KV; None where there is none."""
        if not self.recurrent:
            return None
        assert self.records[slot].tokens == tokens, f"{tokens} tokens of KV, the state has seen {self.records[slot]}"
        return self.records[slot]

    def restored(self, slot: int, record: Record | None) -> None:
        if record is not None:
            self.records[slot] = record
