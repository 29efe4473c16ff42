"""A request while a scheduler owns it: its tokens, its block table, and how far its KV is computed.

tokens    [ prompt ............. | sampled ... ]
KV        [ cached | computed .. | pending ]      computed <= len(tokens)
blocks    [ published ... | private tail ]        published counts blocks findable by hash
"""

from dataclasses import dataclass, field

from scheduler.blocks import BlockHash
from scheduler.ids import BlockId
from scheduler.request import Request


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable, owned by one scheduler, compared by identity.

    arrival: ordinal that orders the waiting queue.
    output_limit: how many tokens this node may sample (1 for the source of a handoff).
    committed: blocks that admission has promised this sequence, now and later.
    """

    request: Request
    arrival: int
    output_limit: int
    tokens: list[int] = field(default_factory=list)
    blocks: list[BlockId] = field(default_factory=list)
    chain: list[BlockHash] = field(default_factory=list)
    computed: int = 0
    cached: int = 0
    published: int = 0
    committed: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt)

    @property
    def outputs(self) -> int:
        """Tokens sampled so far, on any node."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def pending(self) -> int:
        """Tokens whose KV is not computed yet."""
        return len(self.tokens) - self.computed

    @property
    def has_blocks(self) -> bool:
        return bool(self.blocks)
