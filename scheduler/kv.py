"""KV accounting: block tables of sequences over the block pool.

Admission takes blocks for what is known of a sequence, as many of them as possible from the prefix cache:

    [ full blocks of the prompt, found by hash: shared | tail: taken over, or copied before it is written | fresh ]

With `guaranteed` admission all blocks that a sequence may ever need must fit beside what was promised to the others.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass

from scheduler.blocks import BlockPool
from scheduler.effects import Effect
from scheduler.errors import InvariantBroken
from scheduler.events import BlocksRemoved, BlocksStored, KvEvent
from scheduler.ids import BlockHash, BlockId
from scheduler.prefix import extend_chain, hash_partial, is_partial, root
from scheduler.sequence import Sequence
from scheduler.slots import SlotLimits, SlotPool, Snapshots


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """`sequence` reads what `source` holds of it and goes on writing in `target`. The source is pinned meanwhile."""

    sequence: Sequence
    source: BlockId
    target: BlockId


@dataclass(frozen=True, slots=True)
class _Tail:
    """A cached block of which the first `tokens` positions are wanted."""

    block: BlockId
    tokens: int
    take_over: bool


class KvAccounting:
    """Not shared between threads; `block_size` in tokens.

    adapters: digests of the loaded ones by name: what was computed under other weights of the same name is not found.
    committed: blocks promised under guaranteed admission. lookups, hits: blocks asked of and found in the prefix cache.
    """

    def __init__(
        self,
        total_blocks: int,
        block_size: int,
        prefix_caching: bool = True,
        *,
        guaranteed: bool = False,
        kv_events: bool = False,
        state: SlotLimits | None = None,
    ) -> None:
        state = state or SlotLimits()
        if block_size < 1:
            raise ValueError(f"a block holds at least one token, not {block_size}")
        self.pool = BlockPool(total_blocks, report_removed=kv_events)
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.guaranteed = guaranteed
        self.committed = 0
        self.lookups = self.hits = 0
        self._kv_events = kv_events
        self._events: list[KvEvent] = []
        self._event_number = 0
        self._copies: list[BlockCopy] = []
        self.adapters: dict[str, str] = {}
        self.slots = SlotPool(state.slots)
        self.snapshots = Snapshots(state.snapshots)
        self.recurrent = state.recurrent
        self._takes_snapshots = prefix_caching and state.recurrent and state.snapshots > 0
        self._checkpoints: list[Effect] = []
        self._releases: list[Effect] = []
        self._snapshot_restores: list[Effect] = []

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def footprint(self, sequence: Sequence) -> int:
        """Blocks at the end of the request. The last sampled token's KV is never computed."""
        return self.blocks_for(sequence.prompt_tokens + sequence.output_limit - 1)

    def admit(self, sequence: Sequence, tokens: int, *, leave: int, headroom: int = 0, reuse: bool = True) -> bool:
        """Give `sequence` blocks for `tokens` positions; all or nothing, and nothing has changed if it is False.

        leave: how many of the known tokens must stay to be computed (1 where logits are needed).
        headroom: blocks that must stay available. reuse: False takes fresh blocks only.
        Sets `start` to the number of cached tokens. A tail that must be copied is in `copies` then.
        """
        if self.guaranteed and self.committed + self._promise(sequence, tokens) > self.pool.total:
            return False
        if not self.slots.has_room:
            return False
        needed = self.blocks_for(tokens)
        hits = self._match(sequence, leave) if reuse else []
        available = self.pool.available - sum(map(self.pool.is_idle, hits))
        spare = available - headroom - (needed - len(hits))
        if spare < 0:
            return False
        partly = reuse and leave and not self.recurrent
        tail = self._match_tail(sequence, len(hits), leave, spare) if partly else None
        self.pool.acquire(hits)
        sequence.blocks = hits
        sequence.published = len(hits)
        sequence.start = len(hits) * self.block_size
        if tail is not None:
            self._use_tail(sequence, tail)
        self._append_fresh(sequence, needed)
        self.slots.take(sequence)
        if self.recurrent and leave and sequence.published:
            self._snapshot_restores.append(self.snapshots.restore(sequence, sequence.chain[sequence.published - 1]))
        if self.guaranteed:
            sequence.committed = self._promise(sequence, tokens)
            self.committed += sequence.committed
        return True

    def _promise(self, sequence: Sequence, tokens: int) -> int:
        return max(self.footprint(sequence), self.blocks_for(tokens))

    def _match(self, sequence: Sequence, leave: int) -> list[BlockId]:
        if not self.prefix_caching:
            return []
        self._extend_chain(sequence)
        usable = (len(sequence.known) - leave) // self.block_size
        found = self.pool.match(sequence.chain[:usable])
        if self.recurrent and leave:
            # What comes after the snapshot is computed again, and a shared block must not be written for it.
            del found[self.snapshots.deepest(sequence.chain, len(found)) :]
        self.lookups += usable
        self.hits += len(found)
        return found

    def _match_tail(self, sequence: Sequence, full: int, leave: int, spare: int) -> _Tail | None:
        """What is cached of the block after `full` found ones, for who computes the rest (a transfer fills blocks)."""
        first = full * self.block_size
        most = min(len(sequence.known) - leave - first, self.block_size - 1)
        if not self.prefix_caching or most <= 0:
            return None
        if full < len(sequence.chain):
            whole = self.pool.find(sequence.chain[full])
            if whole is not None:
                return self._tail(whole, most, spare)
        parent = sequence.chain[full - 1] if full else self._root(sequence)
        for count in range(min(len(sequence.known) - first, self.block_size - 1), 0, -1):
            block = self.pool.find(hash_partial(parent, sequence.known[first : first + count]))
            if block is not None:
                return self._tail(block, min(count, most), spare)
        return None

    def _tail(self, block: BlockId, tokens: int, spare: int) -> _Tail | None:
        """A partial block that nobody reads is continued in place; any other is copied, which pins it for a while."""
        idle = self.pool.is_idle(block)
        take_over = idle and is_partial(self.pool.name_of(block))
        if idle and not take_over and spare < 1:
            return None
        return _Tail(block, tokens, take_over)

    def _use_tail(self, sequence: Sequence, tail: _Tail) -> None:
        sequence.start += tail.tokens
        if tail.take_over:
            self.pool.take_over(tail.block)
            sequence.blocks.append(tail.block)
            return
        self.pool.acquire([tail.block])
        self._append_fresh(sequence, len(sequence.blocks) + 1)
        self._copies.append(BlockCopy(sequence, tail.block, sequence.blocks[-1]))

    def _append_fresh(self, sequence: Sequence, needed: int) -> None:
        fresh = self.pool.allocate(needed - len(sequence.blocks))
        if fresh is None:
            raise InvariantBroken("blocks that were counted as available are not", sequence.request_id)
        sequence.blocks += fresh

    @property
    def copies(self) -> tuple[BlockCopy, ...]:
        """Copies to be made before the next step."""
        return tuple(self._copies)

    def settle_copies(self, *, copied: bool) -> list[Sequence]:
        """The device has answered. Returns the sequences that have to compute what wasn't copied."""
        copies, self._copies = self._copies, []
        for copy in copies:
            if not copied:
                copy.sequence.start -= copy.sequence.start % self.block_size
                copy.sequence.cached = min(copy.sequence.cached, copy.sequence.start)
            self.pool.release([copy.source])
        return [] if copied else [copy.sequence for copy in copies]

    def extend(self, sequence: Sequence) -> bool:
        """Make the block for the sequence's last token exist; False if there is none."""
        missing = self.blocks_for(len(sequence.known)) - len(sequence.blocks)
        if missing <= 0:
            return True
        fresh = self.pool.allocate(missing)
        if fresh is None:
            return False
        sequence.blocks += fresh
        return True

    def take_back(self, sequence: Sequence, blocks: Items[BlockId]) -> None:
        """Give back the newest blocks of a sequence, which nothing has written."""
        if sequence.blocks[-len(blocks) :] != list(blocks):
            raise InvariantBroken(f"blocks {blocks} are not its newest ones", sequence.request_id)
        del sequence.blocks[-len(blocks) :]
        self.pool.release(blocks)

    def publish(self, sequence: Sequence) -> None:
        """Make the blocks that became full findable."""
        full = sequence.start // self.block_size
        if full <= sequence.published or not self.prefix_caching:
            return
        self._extend_chain(sequence)
        new = [
            index
            for index in range(sequence.published, full)
            if self.pool.publish(sequence.blocks[index], sequence.chain[index])
        ]
        sequence.published = full
        if self._kv_events and new:
            self._report_stored(sequence.chain, new)
        if self.recurrent and full * self.block_size == sequence.start:
            self._checkpoint(sequence, full)

    def _checkpoint(self, sequence: Sequence, full: int) -> None:
        """Keep the state after a full block: of a prompt at each chunk's end, of an answer at intervals."""
        if sequence.start <= sequence.prompt_tokens or full % self.snapshots.interval == 0:
            checkpoint = self.snapshots.checkpoint(sequence, sequence.chain[full - 1])
            if checkpoint is not None:
                self._checkpoints.append(checkpoint)

    def chunk_end(self, sequence: Sequence, end: int) -> int:
        """Where a chunk that may reach `end` ends: at a block's end where that lets a snapshot be taken."""
        if not self._takes_snapshots:
            return end
        last = len(sequence.known) if end < len(sequence.known) else len(sequence.known) - 1
        cut = min(end, last) // self.block_size * self.block_size
        return cut if cut > sequence.start else end

    @property
    def has_slot_effects(self) -> bool:
        return bool(self._checkpoints or self._releases or self._snapshot_restores)

    def take_slot_effects(self) -> tuple[list[Effect], list[Effect], list[Effect]]:
        """What the device must do with slots before the next step: checkpoints, then releases, then restorations."""
        effects = self._checkpoints, self._releases, self._snapshot_restores
        self._checkpoints, self._releases, self._snapshot_restores = [], [], []
        return effects

    def _report_stored(self, chain: Items[BlockHash], indices: Items[int]) -> None:
        self._report_removed()
        runs: list[list[int]] = []
        for index in indices:
            if runs and runs[-1][-1] == index - 1:
                runs[-1].append(index)
            else:
                runs.append([index])
        for run in runs:
            parent = chain[run[0] - 1] if run[0] else None
            self._events.append(BlocksStored(self._number(), parent, tuple(chain[i] for i in run)))

    def _report_removed(self) -> None:
        removed = tuple(name for name in self.pool.take_removed() if not is_partial(name))
        if removed:
            self._events.append(BlocksRemoved(self._number(), removed))

    def _number(self) -> int:
        self._event_number += 1
        return self._event_number

    def take_events(self) -> tuple[KvEvent, ...]:
        """What became findable or was evicted since the last call, in order."""
        if not self._kv_events:
            return ()
        self._report_removed()
        events, self._events = tuple(self._events), []
        return events

    def release(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Give back all blocks; published ones stay cached, and with `keep` the partial tail does as well."""
        try:
            if keep:
                self._publish_tail(sequence)
            self.pool.release(sequence.blocks)
            released = self.slots.give_back(sequence, "kept" if keep else "dropped")
        except InvariantBroken as error:
            raise InvariantBroken(error.message, sequence.request_id) from error
        if released is not None:
            self._releases.append(released)
        sequence.blocks = []
        sequence.published = 0
        if sequence.committed:
            # A promise ends although all its blocks may live on in other hands: whoever waits must try again.
            self.committed -= sequence.committed
            sequence.committed = 0
            self.pool.generation += 1

    def _publish_tail(self, sequence: Sequence) -> None:
        full, rest = divmod(sequence.start, self.block_size)
        # Only behind a published parent: a tail whose parent can't be found can't be found either.
        if not rest or not self.prefix_caching or full != sequence.published or full >= len(sequence.blocks):
            return
        parent = sequence.chain[full - 1] if full else self._root(sequence)
        first = full * self.block_size
        self.pool.publish(sequence.blocks[full], hash_partial(parent, sequence.known[first : first + rest]))

    def _extend_chain(self, sequence: Sequence) -> None:
        if (len(sequence.chain) + 1) * self.block_size <= len(sequence.known):
            extend_chain(sequence.chain, sequence.known, self.block_size, self._root(sequence))

    def _root(self, sequence: Sequence) -> BlockHash:
        adapter = sequence.adapter
        return root(adapter and self.adapters.get(adapter, adapter), sequence.request.cache_salt)
