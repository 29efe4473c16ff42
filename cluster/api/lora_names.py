"""The LoRA adapters that requests may name as their model."""

import asyncio
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """path: of its folder on the nodes. created: seconds since the epoch."""

    name: str
    path: str
    created: int


@dataclass(slots=True)
class LoraNames:
    """served: on all nodes, by name. leaving: names that no request may use, while some nodes may have them.

    turn: held while one adapter is loaded or unloaded.
    """

    served: dict[str, ServedAdapter] = field(default_factory=dict)
    leaving: set[str] = field(default_factory=set)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
