"""The hash chain that names the content of blocks: equal name, equal tokens, adapter and salt from position 0 on.

root(adapter, salt) <- full block 0 <- full block 1 <- ... <- partial tail
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from struct import pack
from sys import byteorder

from scheduler.ids import BlockHash

_PARTIAL = b"~"


def root(adapter: str | None, salt: str | None) -> BlockHash:
    """The parent of the first block. Requests of another adapter or another tenant's salt get other names."""
    if adapter is None and salt is None:
        return b""
    parts = [b"" if part is None else b"=" + part.encode() for part in (adapter, salt)]
    lengths = pack("<II", *map(len, parts))
    return blake2b(lengths + b"".join(parts), digest_size=16).digest()


def hash_block(parent: BlockHash, tokens: Sequence[int]) -> BlockHash:
    """The 16-byte name of a full block that holds `tokens` and follows the block named `parent`."""
    return _name(parent, _bytes(tokens))


def hash_partial(parent: BlockHash, tokens: Sequence[int]) -> BlockHash:
    """The name of a block of which only the first positions hold `tokens`; never the name of a full block."""
    return _PARTIAL + hash_block(parent, tokens)


def is_partial(block_hash: BlockHash) -> bool:
    return len(block_hash) > 16


def extend_chain(chain: list[BlockHash], tokens: Sequence[int], block_size: int, first_parent: BlockHash = b"") -> None:
    """Append the hashes of the blocks of `tokens` that are full and not in `chain` yet."""
    first, full = len(chain), len(tokens) // block_size
    if first >= full:
        return
    content = _bytes(tokens[first * block_size : full * block_size])
    width = len(content) // (full - first)
    parent = chain[-1] if chain else first_parent
    for offset in range(0, len(content), width):
        parent = _name(parent, content[offset : offset + width])
        chain.append(parent)


def _bytes(tokens: Sequence[int]) -> bytes:
    """Four bytes a token, little-endian, so that all machines of a cluster use the same names."""
    ids = array("I", tokens)
    if byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def _name(parent: BlockHash, content: bytes) -> BlockHash:
    return blake2b(parent + content, digest_size=16).digest()
