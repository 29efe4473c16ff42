"""Which UCX is loaded and what it can use here."""

from collections.abc import Sequence

from cluster.doctor.cuda_facts import CudaFacts
from cluster.doctor.finding import Finding, Level
from handoff.transports.ucx_facts import UcxFacts

SYSTEM_UCX = "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY"
_RDMA_MODULES = ("ib", "rdmacm")
_NETWORK_LESS = ("self", "tcp", "sysv", "posix", "cma", "xpmem", "knem", "cuda_copy", "cuda_ipc", "gdr_copy")
_INSTALL_RDMA = (
    "Install a UCX with verbs (your system's packages, MLNX_OFED or conda-forge), "
    f"and start Prelay with {SYSTEM_UCX}=true."
)


def check_ucx(ucx: UcxFacts, wants_system: bool, rdma_devices: Sequence[str], cuda: CudaFacts) -> list[Finding]:
    """wants_system: the user asks for the system's UCX. rdma_devices: the kernel's names, such as mlx5_0."""
    return [_loaded(ucx, wants_system), _seen(ucx), _rdma(ucx, rdma_devices), *_gpu(ucx, cuda)]


def no_ucx(reason: str) -> Finding:
    """UCX could not be loaded or asked."""
    return Finding(
        Level.BROKEN,
        "UCX does not start",
        f"Nodes exchange KV over UCX, and it could not be loaded: {reason}",
        "Reinstall ucxx-cu12 and libucx-cu12, and unset UCX_* variables that you don't need.",
    )


def _loaded(ucx: UcxFacts, wants_system: bool) -> Finding:
    origin = "the Python wheel" if ucx.from_wheel else "the system"
    missing = [name for name in _RDMA_MODULES if name not in ucx.modules]
    built = f"built without {' and '.join(missing)}" if missing else "built with verbs (ib) and rdmacm"
    what = f"UCX {ucx.version} of {origin} is loaded, {built}: {ucx.path}."
    if wants_system and ucx.from_wheel:
        todo = f"Install a UCX of the system's (libucp.so must be found by the loader), or unset {SYSTEM_UCX}."
        return Finding(Level.SLOW, "Not the UCX you asked for", f"{SYSTEM_UCX} is set, yet: {what}", todo)
    return Finding(Level.OK, "UCX is loaded", what)


def _seen(ucx: UcxFacts) -> Finding:
    if not ucx.lanes:
        return Finding(
            Level.BROKEN,
            "UCX sees no device",
            "UCX can use no transport here, so nodes can't be joined.",
            "Unset UCX_TLS and UCX_NET_DEVICES.",
        )
    return Finding(Level.OK, "Transports and devices", f"UCX can use {', '.join(ucx.lanes)}.")


def _rdma(ucx: UcxFacts, devices: Sequence[str]) -> Finding:
    if not devices:
        return Finding(Level.NOTE, "No RDMA", "This machine has no RDMA device: other machines are reached by TCP.")
    title, names = "RDMA", ", ".join(devices)
    if "ib" not in ucx.modules:
        what = f"This machine has {names}, but the loaded UCX was built without verbs: TCP is used instead."
        return Finding(Level.SLOW, "RDMA is not used", what, _INSTALL_RDMA)
    used = sorted(ucx.transports.difference(_NETWORK_LESS))
    if not used:
        what = f"This machine has {names}, and UCX was built with verbs, but can use none of them: TCP is used instead."
        todo = "Check UCX_TLS and UCX_NET_DEVICES, that a port is active (ibv_devinfo), and access to /dev/infiniband."
        return Finding(Level.SLOW, "RDMA is not used", what, todo)
    return Finding(Level.OK, title, f"UCX can use {', '.join(used)} on {names}.")


def _gpu(ucx: UcxFacts, cuda: CudaFacts) -> list[Finding]:
    missing = [name for name in ("cuda_copy", "cuda_ipc") if name not in ucx.transports]
    if not cuda.devices or not missing:
        return []
    what = f"There is a GPU, but UCX can't use {' and '.join(missing)}: KV in GPU memory would go by way of the host."
    todo = "Unset UCX_TLS, or add cuda to it; check that the loaded UCX was built with CUDA."
    # Without cuda_copy UCX takes GPU memory for host memory and crashes.
    level = Level.BROKEN if "cuda_copy" in missing else Level.SLOW
    return [Finding(level, "UCX does not use the GPU", what, todo)]
