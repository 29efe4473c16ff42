"""Identifiers. All are opaque to the code that passes them on."""

from typing import NewType

RequestId = NewType("RequestId", str)
HandoffId = NewType("HandoffId", str)
NodeId = NewType("NodeId", str)
BlockId = NewType("BlockId", int)
"""Index of a block in one node's KV pool, 0 <= id < total_blocks."""
