"""Transports by name, as settings name them."""

from collections.abc import Callable

from handoff.transports.base import Transport


def _ucx() -> Transport:
    from handoff.transports.ucx import UcxTransport

    return UcxTransport()


_TRANSPORTS: dict[str, Callable[[], Transport]] = {"ucx": _ucx}

TRANSPORT_NAMES = tuple(_TRANSPORTS)
"""Transports between processes; `memory` joins nodes of one process and is made by hand."""


def make_transport(name: str) -> Transport:
    """Raises ValueError for a name that is not in TRANSPORT_NAMES."""
    try:
        return _TRANSPORTS[name]()
    except KeyError:
        raise ValueError(f"unknown transport {name!r}: choose one of {', '.join(TRANSPORT_NAMES)}") from None
