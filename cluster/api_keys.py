"""API keys, by their digests. The command line reads them, so this imports little."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from hmac import compare_digest

MAX_KEY_CHARS = 1024
NAME_CHARS = 12


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """Digests of the keys; the keys themselves are nowhere kept."""

    _digests: tuple[bytes, ...] = field(repr=False)

    @staticmethod
    def of(keys: Iterable[str]) -> "ApiKeys":
        """Raises ValueError for a key that no header can hold, without showing it."""
        digests = []
        for key in dict.fromkeys(keys):
            if not 0 < len(key) <= MAX_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
                raise ValueError(f"an API key has 1 to {MAX_KEY_CHARS} printable ASCII characters and no space")
            digests.append(sha256(key.encode()).digest())
        return ApiKeys(tuple(digests))

    def __bool__(self) -> bool:
        return bool(self._digests)

    def name_of(self, key: bytes) -> str | None:
        """A short name of a key that is among these, which doesn't tell the key; None if it isn't."""
        presented = sha256(key).digest()
        # All are compared, each in constant time: how long it takes tells nothing.
        known = [compare_digest(presented, digest) for digest in self._digests]
        return f"key-{presented.hex()[:NAME_CHARS]}" if any(known) else None
