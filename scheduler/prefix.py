"""The hash chain that names the content of full blocks: equal hash, equal tokens from the start of the prompt."""

from collections.abc import Sequence
from hashlib import blake2b
from struct import pack

from scheduler.blocks import BlockHash

ROOT: BlockHash = b""


def hash_block(parent: BlockHash, tokens: Sequence[int]) -> BlockHash:
    """The 16-byte name of a block that holds `tokens` and follows the block named `parent`."""
    return blake2b(parent + pack(f"<{len(tokens)}I", *tokens), digest_size=16).digest()


def extend_chain(chain: list[BlockHash], tokens: Sequence[int], block_size: int) -> None:
    """Append the hashes of the blocks of `tokens` that are full and not in `chain` yet."""
    for index in range(len(chain), len(tokens) // block_size):
        parent = chain[-1] if chain else ROOT
        chain.append(hash_block(parent, tokens[index * block_size : (index + 1) * block_size]))
