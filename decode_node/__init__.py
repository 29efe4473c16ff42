"""A decode replica: reserves blocks, receives KV, writes answers."""
