"""Stop strings, found across token borders, in time linear in the text."""

from collections.abc import Sequence
from dataclasses import dataclass


class _Automaton:
    """Knuth-Morris-Pratt: `matched` characters of `pattern` end the text so far."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.matched = 0
        self._fallback = _borders(pattern)

    def push(self, character: str) -> bool:
        while self.matched and self.pattern[self.matched] != character:
            self.matched = self._fallback[self.matched - 1]
        if self.pattern[self.matched] == character:
            self.matched += 1
        return self.matched == len(self.pattern)


def _borders(pattern: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = borders[length - 1]
        if pattern[i] == pattern[length]:
            length += 1
        borders[i] = length
    return borders


@dataclass(frozen=True, slots=True)
class StopResult:
    """Text that may be sent, and whether a stop string ended it."""

    text: str
    is_stopped: bool


class StopMatcher:
    """Finds the stop string that ends first, and of those that end together the longest.

    Text that may be the start of a stop string is held back until it is decided. After a match nothing may be
    pushed any more. Each of `stops` has at least one character.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._automata = [_Automaton(stop) for stop in stops]
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str) -> StopResult:
        buffer = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            hits = [a for a in self._automata if a.push(character)]
            if hits:
                return self._matched(buffer, end, max(len(a.pattern) for a in hits))
        n_held = max((a.matched for a in self._automata), default=0)
        n_sent = len(buffer) - n_held
        self._held = buffer[n_sent:]
        return StopResult(buffer[:n_sent], is_stopped=False)

    def flush(self) -> str:
        """The held text, when the output ended otherwise."""
        held, self._held = self._held, ""
        return held

    def _matched(self, buffer: str, end: int, n_stop: int) -> StopResult:
        self._held = ""
        return StopResult(buffer[: end if self._include_stop else end - n_stop], is_stopped=True)
