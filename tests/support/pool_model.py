"""A block pool as its definition says it, in lists: who owns which block, what each is named, what is idle since when.

The model of the property tests. It looks at everything each time and shares no code with the scheduler.
"""

from collections.abc import Hashable, Sequence


class PoolModel:
    """tables: blocks by owner. name_of: published blocks. idle: published ones that nobody owns, least recently used
    first. removed: names that were withdrawn, in order. freed: how often a block lost its last owner.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.tables: dict[int, list[int]] = {}
        self.name_of: dict[int, Hashable] = {}
        self.idle: list[int] = []
        self.removed: list[Hashable] = []
        self.freed = 0
        self._owners = 0

    def new_owner(self) -> int:
        self._owners += 1
        self.tables[self._owners] = []
        return self._owners

    def owners(self, block: int) -> int:
        return sum(table.count(block) for table in self.tables.values())

    @property
    def free(self) -> list[int]:
        """Blocks that nobody owns and that have no name."""
        return [block for block in range(self.total) if not self.owners(block) and block not in self.idle]

    @property
    def available(self) -> int:
        return len(self.free) + len(self.idle)

    def find(self, name: Hashable) -> int | None:
        for block, its_name in self.name_of.items():
            if its_name == name:
                return block
        return None

    def run(self, names: Sequence[Hashable]) -> list[int]:
        """The blocks of the longest known run from the start of `names`."""
        found = []
        for name in names:
            block = self.find(name)
            if block is None:
                break
            found.append(block)
        return found

    def acquire(self, owner: int, blocks: Sequence[int]) -> None:
        for block in blocks:
            assert self.owners(block) or block in self.idle, f"block {block} is free"
            self.tables[owner].append(block)
        self.idle = [block for block in self.idle if block not in blocks]

    def take_over(self, owner: int, block: int) -> None:
        """An idle block becomes private: its name is gone."""
        self.idle.remove(block)
        self._withdraw(block)
        self.tables[owner].append(block)

    def allocated(self, owner: int, blocks: Sequence[int]) -> None:
        """The pool has chosen `blocks`: free ones, and where these are too few, the least recently used idle ones."""
        free, idle = self.free, self.idle
        evicted = max(0, len(blocks) - len(free))
        kept = len(blocks) - evicted
        assert len(set(blocks)) == len(blocks), f"a block twice in {blocks}"
        assert set(blocks[:kept]) <= set(free), f"{blocks[:kept]} are not all free: {free}"
        assert list(blocks[kept:]) == idle[:evicted], f"evicted {blocks[kept:]}, least recently used are {idle}"
        for block in blocks[kept:]:
            self.idle.remove(block)
            self._withdraw(block)
        self.tables[owner] += blocks

    def _withdraw(self, block: int) -> None:
        self.removed.append(self.name_of.pop(block))

    def publish(self, block: int, name: Hashable) -> bool:
        """The first block with a name keeps it, and a block keeps its first name."""
        if block in self.name_of or self.find(name) is not None:
            return False
        self.name_of[block] = name
        return True

    def release(self, owner: int, blocks: Sequence[int] | None = None) -> None:
        """One reference less to each block, from the last one on; of the whole table by default."""
        table = self.tables[owner]
        for block in list(reversed(table if blocks is None else blocks)):
            table.remove(block)
            if not self.owners(block):
                self.freed += 1
                if block in self.name_of:
                    self.idle.append(block)
        if not table:
            del self.tables[owner]
