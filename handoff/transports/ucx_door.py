"""Who is let in: hellos are read and proven here, and what is remembered of those that nobody knows is bounded.

Time is an argument.
"""

import structlog

from handoff.transports.ucx_seal import ClusterKey, NotAuthentic
from handoff.transports.ucx_wire import Hello, check_hello, is_newer

log = structlog.get_logger()

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


class Stranger(ValueError):
    """It could not prove the secret. hello: what it claims. is_news: worth a warning."""

    def __init__(self, hello: Hello, is_news: bool) -> None:
        super().__init__(f"transport {hello.identity.hex()} has another cluster secret or none")
        self.hello = hello
        self.is_news = is_news


class Door:
    """identity: our own."""

    def __init__(self, key: ClusterKey, identity: bytes) -> None:
        self.early = EarlyHellos()
        self._key = key
        self._identity = identity
        self._strangers = Strangers()

    def admit(self, data: bytes, now: float) -> Hello | None:
        """A hello for us whose sender has the secret; None for what isn't for us. Raises Stranger."""
        try:
            hello = Hello.unpack(data)
        except ValueError as error:
            if self._strangers.is_news(b"", now):
                log.warning("hello dropped", error=str(error))
            return None
        if hello.receiver != self._identity:
            # Said to who had this address before, or recorded elsewhere.
            log.debug("hello for another transport dropped", identity=hello.identity.hex())
            return None
        try:
            check_hello(data, self._key)
        except NotAuthentic:
            raise Stranger(hello, self._strangers.is_news(hello.identity, now)) from None
        return hello
