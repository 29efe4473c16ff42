"""LoRA adapters of a device: commands for its table, and what it says of them."""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """path: a folder in peft format. Loading a name again replaces it if the content is the same or nobody uses it."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    name: str


@dataclass(frozen=True, slots=True)
class ListAdapters:
    pass


LoraCommand: TypeAlias = LoadAdapter | UnloadAdapter | ListAdapters


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """digest: of the adapter's weights and settings; two nodes hand a request over only if theirs are equal."""

    name: str
    digest: str
    rank: int
    target_modules: tuple[str, ...]


class AdapterRefused(ValueError):
    """An adapter can't be loaded or unloaded: the sentence says why and what to do. The table is unchanged."""
