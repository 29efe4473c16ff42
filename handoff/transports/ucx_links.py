"""Which lane UCX chose for an endpoint, asked from UCX itself, and what to tell the user about it."""

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path

from handoff.transports.shared_pool import SETTING, shared_pools_allowed
from handoff.transports.ucx_wire import PoolPlace

_FIELD_TRANSPORTS = 1 << 3  # UCP_EP_ATTR_FIELD_TRANSPORTS
_MAX_LANES = 32
_NO_BULK = ("self", "cuda_copy")


class _Lane(ctypes.Structure):  # ucp_transport_entry_t
    _fields_ = (("transport", ctypes.c_char_p), ("device", ctypes.c_char_p))


class _Lanes(ctypes.Structure):  # ucp_transports_t
    _fields_ = (
        ("entries", ctypes.POINTER(_Lane)),
        ("num_entries", ctypes.c_uint),
        ("entry_size", ctypes.c_size_t),
    )


class _EndpointAttributes(ctypes.Structure):  # ucp_ep_attr_t
    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("name", ctypes.c_char * 32),
        ("local", ctypes.c_char * 128),
        ("remote", ctypes.c_char * 128),
        ("lanes", _Lanes),
    )


def endpoint_transports(endpoint: int) -> list[str]:
    """UCX's names of the transports of an endpoint (a `ucp_ep_h`), e.g. ["rc_mlx5", "tcp"]; [] if unknown.

    ucxx doesn't expose the query; UCX is already loaded, so this finds the same library.
    """
    entries = (_Lane * _MAX_LANES)()
    attributes = _EndpointAttributes(field_mask=_FIELD_TRANSPORTS)
    attributes.lanes.entries = entries
    attributes.lanes.num_entries = _MAX_LANES
    attributes.lanes.entry_size = ctypes.sizeof(_Lane)
    query = ctypes.CDLL("libucp.so.0").ucp_ep_query
    query.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    query.restype = ctypes.c_int
    if query(endpoint, ctypes.byref(attributes)) != 0:
        return []
    return [entries[i].transport.decode() for i in range(attributes.lanes.num_entries)]


def lane_name(transports: Sequence[str]) -> str:
    """UCX's way for bulk bytes: "rc_mlx5", "cuda_ipc", "tcp", ...; TCP counts only when alone."""
    names = [name for name in dict.fromkeys(transports) if name not in _NO_BULK]
    fast = [name for name in names if name != "tcp"]
    return "+".join(fast or names) or "unknown"


def joint_lane(incoming: str, outgoing: str) -> str:
    """What a Link says: the lanes of bulk bytes to us and from us."""
    return incoming if incoming == outgoing else f"{incoming} in, {outgoing} out"


def pool_lane(place: PoolPlace) -> str:
    """The lane of bytes that the receiver copies from a pool by itself: "shm" from a mapping, "cma" by the kernel."""
    return "shm" if place.is_file else "cma"


def lane_warning(lane: str, same_host: bool, environ: Mapping[str, str]) -> str | None:
    """A sentence for the user when the bytes between two nodes on one machine go by TCP."""
    if not same_host or "tcp" not in lane.replace(",", "").split():
        return None
    problem = "Both nodes are on this machine, yet bytes between them go by TCP, about ten times slower than a copy:"
    if not shared_pools_allowed(environ):
        return f"{problem} {SETTING}={environ[SETTING]} forbids to read the other's pool. Unset it."
    return (
        f"{problem} one can't read the other's pool. Give both one user and one PID namespace (containers:"
        " --pid=host); the log of the one that reads says what it met."
    )


def host_identity() -> bytes:
    """16 bytes that are equal in all processes of one running machine."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    return bytes.fromhex(boot.strip().replace("-", ""))
