"""What a check says."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Level(Enum):
    """OK and NOTE need nothing done. SLOW: serving works, and is slower than it could be. BROKEN: serving fails."""

    OK = "ok"
    NOTE = "note"
    SLOW = "slow"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Finding:
    """title: a few words. what: one or two sentences. what_to_do: empty when there's nothing to do."""

    level: Level
    title: str
    what: str
    what_to_do: str = ""

    @property
    def is_bad(self) -> bool:
        return self.level in (Level.SLOW, Level.BROKEN)


@dataclass(frozen=True, slots=True)
class Section:
    name: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """facts: what the findings are made from, as plain data."""

    sections: tuple[Section, ...]
    facts: Mapping[str, Any]

    @property
    def bad(self) -> list[Finding]:
        return [finding for section in self.sections for finding in section.findings if finding.is_bad]

    @property
    def exit_status(self) -> int:
        """0: all fine. 1: something breaks or slows serving."""
        return 1 if self.bad else 0
