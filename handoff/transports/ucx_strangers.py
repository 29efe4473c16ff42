"""What a transport remembers of those that it doesn't know: bounded, whatever they send. Pure; time is an argument."""

from handoff.transports.ucx_wire import Hello, is_newer

EARLY_HELLOS = 1024
"""Hellos kept from transports that this node hasn't connected to yet; the oldest go first."""
STRANGERS = 256
"""Identities kept of transports without the secret; the oldest go first."""
WARN_EVERY_S = 1.0
"""Each of them is warned of once, and not more often than this: who sends many fills no log."""


class EarlyHellos:
    """Authentic hellos that came before this node's own `connect`, the newest of each transport."""

    def __init__(self) -> None:
        self._hellos: dict[bytes, Hello] = {}

    def __len__(self) -> int:
        return len(self._hellos)

    def keep(self, hello: Hello) -> None:
        """An older one than is there comes too late, or is repeated by somebody."""
        known = self._hellos.get(hello.identity)
        if known is not None and not is_newer(hello.number, known.number):
            return
        self._hellos.pop(hello.identity, None)
        self._hellos[hello.identity] = hello
        if len(self._hellos) > EARLY_HELLOS:
            self._hellos.pop(next(iter(self._hellos)))

    def take(self, identity: bytes) -> Hello | None:
        return self._hellos.pop(identity, None)


class Strangers:
    """Whether one that could not prove the secret is worth a warning."""

    def __init__(self) -> None:
        self._warned_of: dict[bytes, None] = {}
        self._last: float | None = None

    def __len__(self) -> int:
        return len(self._warned_of)

    def is_news(self, identity: bytes, now: float) -> bool:
        """To be called once for each hello that was refused."""
        if identity in self._warned_of or (self._last is not None and now - self._last < WARN_EVERY_S):
            return False
        self._last = now
        self._warned_of[identity] = None
        if len(self._warned_of) > STRANGERS:
            self._warned_of.pop(next(iter(self._warned_of)))
        return True
