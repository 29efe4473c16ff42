"""KV accounting: block tables of sequences over the block pool, with admission by commitment.

A sequence is admitted when the blocks it may ever need fit beside what is already committed, so that a running
sequence always finds its next block and nothing has to be preempted.
"""

from scheduler.blocks import BlockPool
from scheduler.errors import InvariantBroken
from scheduler.ids import BlockId
from scheduler.prefix import extend_chain
from scheduler.sequence import Sequence


class KvAccounting:
    """Not shared between threads; `block_size` in tokens."""

    def __init__(self, total_blocks: int, block_size: int, prefix_caching: bool = True) -> None:
        self.pool = BlockPool(total_blocks)
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.committed = 0

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def footprint(self, sequence: Sequence) -> int:
        """Blocks at the end of the request. The last sampled token's KV is never computed."""
        return self.blocks_for(sequence.prompt_tokens + sequence.output_limit - 1)

    def admit(self, sequence: Sequence, tokens: int, *, leave: int) -> bool:
        """Give `sequence` blocks for `tokens` positions, from the prefix cache where possible; all or nothing.

        leave: how many of the prompt's last tokens must stay to be computed (1 where logits are needed).
        Sets `computed` to the number of cached tokens. False when it doesn't fit now.
        """
        needed = max(self.footprint(sequence), self.blocks_for(tokens))
        if self.committed + needed > self.pool.total:
            return False
        hits = self._match(sequence, leave)
        self.pool.acquire(hits)
        fresh = self.pool.allocate(self.blocks_for(tokens) - len(hits))
        if fresh is None:
            self.pool.release(hits)
            return False
        sequence.blocks = hits + fresh
        sequence.published = len(hits)
        sequence.cached = sequence.computed = len(hits) * self.block_size
        sequence.committed = needed
        self.committed += needed
        return True

    def _match(self, sequence: Sequence, leave: int) -> list[BlockId]:
        if not self.prefix_caching:
            return []
        extend_chain(sequence.chain, sequence.tokens, self.block_size)
        usable = (sequence.prompt_tokens - leave) // self.block_size
        return self.pool.match(sequence.chain[:usable])

    def extend(self, sequence: Sequence) -> None:
        """Make the block for the sequence's last token exist."""
        missing = self.blocks_for(len(sequence.tokens)) - len(sequence.blocks)
        if missing <= 0:
            return
        fresh = self.pool.allocate(missing)
        if fresh is None:
            raise InvariantBroken(
                f"{sequence.request.request_id}: no block left although {self.committed} of "
                f"{self.pool.total} are committed"
            )
        sequence.blocks.extend(fresh)

    def publish(self, sequence: Sequence) -> None:
        """Make the blocks that became full findable."""
        if not self.prefix_caching:
            return
        full = sequence.computed // self.block_size
        if full <= sequence.published:
            return
        extend_chain(sequence.chain, sequence.tokens, self.block_size)
        for index in range(sequence.published, full):
            self.pool.publish(sequence.blocks[index], sequence.chain[index])
        sequence.published = full

    def release(self, sequence: Sequence) -> None:
        """Give back all blocks; published ones stay cached."""
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        self.committed -= sequence.committed
        sequence.committed = 0
