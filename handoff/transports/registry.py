"""Transports by name, as settings name them."""

from collections.abc import Callable

from handoff.transports.base import Transport


def _ucx(secret: bytes) -> Transport:
    from handoff.transports.ucx import UcxTransport

    return UcxTransport(secret=secret)


_TRANSPORTS: dict[str, Callable[[bytes], Transport]] = {"ucx": _ucx}

TRANSPORT_NAMES = tuple(_TRANSPORTS)
"""Transports between processes; `memory` joins nodes of one process and is made by hand."""


def make_transport(name: str, secret: bytes) -> Transport:
    """secret: the cluster's; peers with another one are refused. Raises ValueError for no name of TRANSPORT_NAMES."""
    if name not in _TRANSPORTS:
        raise ValueError(f"unknown transport {name!r}: choose one of {', '.join(TRANSPORT_NAMES)}")
    return _TRANSPORTS[name](secret)
