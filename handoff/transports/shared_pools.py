"""One transport's part in sharing pools: our pool's place, our control file, peers' pools within reach."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import structlog

from handoff.transports.control_file import ControlFile
from handoff.transports.shared_pool import PeerPool, find_place, shared_pools_allowed
from handoff.transports.ucx_wire import Address, PoolPlace

log = structlog.get_logger()


class SharedPools:
    """What can't be shared is left to UCX, and logged."""

    def __init__(self, pool: Any, identity: bytes, environ: Mapping[str, str]) -> None:
        self.place: PoolPlace | None = None
        """Of our pool; None if peers can't read it by themselves."""
        self._control: ControlFile | None = None
        self._allowed = shared_pools_allowed(environ) and isinstance(pool, np.ndarray)
        if not self._allowed:
            return
        try:
            self._control = ControlFile(identity)
            self.place = find_place(pool, self._control)
        except OSError as error:
            log.warning("our pool can't be shared", error=str(error))

    def reach(self, name: str, address: Address) -> PeerPool | None:
        """The pool of a peer on this machine; None if UCX must carry its bytes."""
        if not self._allowed or address.place is None:
            return None
        try:
            return PeerPool(address.place, address.identity)
        except (OSError, ValueError) as error:
            log.warning("a peer's pool can't be reached; UCX carries its bytes", peer=name, error=str(error))
            return None

    def set(self, number: int) -> None:
        """Our connection `number` stands."""
        if self._control is not None:
            self._control.set(number)

    def clear(self, number: int) -> None:
        """Our connection `number` is given up."""
        if self._control is not None:
            self._control.clear(number)

    def close(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
