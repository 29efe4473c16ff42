"""Numbers as words of raw bits: numpy has no bfloat16, and what isn't converted must keep every bit."""

from typing import Any

WORDS = {"fp32": "uint32", "fp16": "uint16", "bf16": "uint16"}
EXACT = (("bf16", "fp32"), ("fp16", "fp32"))
"""(source, destination): every number of the first is one of the second."""


def words(xp: Any, memory: Any, dtype: str) -> Any:
    """Flat uint8 memory as unsigned words of `dtype`'s size, without a copy."""
    return memory.view(getattr(xp, WORDS[dtype]))


def convert(xp: Any, content: Any, source: str, destination: str) -> Any:
    """Words of `source` as words of `destination`; the same array when the two are equal. Raises ValueError."""
    if source == destination:
        return content
    if (source, destination) not in EXACT:
        raise ValueError(f"{source} has numbers that {destination} has not")
    if source == "bf16":
        wide = content.astype(xp.uint32)
        wide <<= 16
        return wide
    return content.view(xp.float16).astype(xp.float32).view(xp.uint32)
