"""Identifiers. All are opaque to the code that passes them on."""

from typing import NewType, TypeAlias

RequestId = NewType("RequestId", str)
HandoffId = NewType("HandoffId", str)
NodeId = NewType("NodeId", str)
BlockId = NewType("BlockId", int)
"""Index of a block in one node's KV pool, 0 <= id < total_blocks."""
BlockHash: TypeAlias = bytes
"""The name of a block's content, see scheduler/prefix.py."""
