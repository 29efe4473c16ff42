"""Slots, and snapshots of them: who owns which row of a device's slot-addressed state.

A slot is dirty when its owner is gone, and free when the device has zeroed it (ReleaseSeq): nobody gets it before,
since what lands or is computed in it would be wiped.

A snapshot is a copy of one slot's state right after a full block (a Marconi checkpoint). Recurrent state can't be
rewound or shared, so a model that has it can start from cached blocks only where there is a snapshot.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass

from scheduler.effects import NO_SLOT, MarconiCheckpoint, ReleaseSeq, SsmSnapshotRestore
from scheduler.errors import InvariantBroken
from scheduler.ids import BlockHash, RequestId
from scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SlotLimits:
    """What the device says of its slot-addressed state, see DeviceFacts. recurrent: part of it is recurrent state."""

    slots: int = 0
    snapshots: int = 0
    recurrent: bool = False


class SlotPool:
    """total: 0 where the device has no slot-addressed state; everybody gets NO_SLOT then."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = deque(range(total))
        self._owner: dict[int, RequestId] = {}
        self._dirty: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def has_room(self) -> bool:
        return not self.total or bool(self._free)

    def take(self, sequence: Sequence) -> None:
        """Give `sequence` a slot; there must be room."""
        if self.total:
            sequence.slot = self._free.popleft()
            self._owner[sequence.slot] = sequence.request_id

    def give_back(self, sequence: Sequence, what: str) -> ReleaseSeq | None:
        """Its slot is dirty from now on. Returns what the device must do before another one gets it."""
        slot = sequence.slot
        if slot == NO_SLOT:
            return None
        sequence.slot = NO_SLOT
        if self._owner.pop(slot, None) != sequence.request_id:
            raise InvariantBroken(f"slot {slot} is not its own", sequence.request_id)
        self._dirty.add(slot)
        return ReleaseSeq(sequence.request_id, slot, what)

    def cleaned(self, slot: int) -> None:
        """The device has zeroed it."""
        self._dirty.remove(slot)
        self._free.append(slot)

    def check(self, owned: dict[int, RequestId]) -> None:
        """Prove that each slot is free, dirty or owned by the one who says so. Raises InvariantBroken."""
        if owned != self._owner:
            raise InvariantBroken(f"slots are owned by {self._owner}, sequences say {owned}")
        places = [*self._free, *self._dirty, *self._owner]
        if sorted(places) != list(range(self.total)):
            raise InvariantBroken(f"slots {sorted(places)} are not each of {self.total} once")


class Snapshots:
    """Places for snapshots, found by the name of the last block they cover, least recently used first to go.

    interval: blocks between two checkpoints of a sequence that decodes.
    """

    def __init__(self, total: int, interval: int = 4) -> None:
        self.interval = interval
        self._free = list(range(total))
        self._place_of: OrderedDict[BlockHash, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._place_of)

    def deepest(self, chain: list[BlockHash], most: int) -> int:
        """The greatest number of blocks, at most `most`, after which there is a snapshot; 0 for none."""
        for count in range(most, 0, -1):
            if chain[count - 1] in self._place_of:
                return count
        return 0

    def restore(self, sequence: Sequence, block_hash: BlockHash) -> SsmSnapshotRestore:
        """How `sequence`, which has its slot, gets the state after this block."""
        self._place_of.move_to_end(block_hash)
        return SsmSnapshotRestore(sequence.request_id, sequence.slot, self._place_of[block_hash])

    def checkpoint(self, sequence: Sequence, block_hash: BlockHash) -> MarconiCheckpoint | None:
        """How the state that `sequence` has now, right after this block, is kept; None if it is, or can't be."""
        if block_hash in self._place_of:
            self._place_of.move_to_end(block_hash)
            return None
        if self._free:
            place = self._free.pop()
        elif self._place_of:
            _, place = self._place_of.popitem(last=False)
        else:
            return None
        self._place_of[block_hash] = place
        return MarconiCheckpoint(sequence.request_id, sequence.slot, sequence.start, place)

    def holds(self, place: int) -> bool:
        """Whether there is a snapshot in this place, as far as is known."""
        return place in self._place_of.values()

    def forget(self, place: int) -> None:
        """A snapshot could not be made, or not be read."""
        for block_hash, known in self._place_of.items():
            if known == place:
                del self._place_of[block_hash]
                self._free.append(place)
                return
