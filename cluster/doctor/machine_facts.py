"""What the kernel says of this machine and of this process. Linux only; what can't be read counts as absent."""

import os
import resource
from dataclasses import dataclass
from pathlib import Path

import psutil

_CAP_IPC_LOCK = 14
_PEER_MEMORY_MODULES = ("nvidia_peermem", "nv_peer_mem")
_INITIAL_IPC, _INITIAL_PID = "ipc:[4026531839]", "pid:[4026531836]"
"""The kernel gives the first namespaces fixed numbers (include/linux/proc_ns.h)."""


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Sizes in bytes. memlock, memlock_hard: None is unlimited; they don't count with may_lock (CAP_IPC_LOCK).

    shm_total, shm_free: of /dev/shm; None if it can't be used. ptrace_scope: None without Yama.
    own_ipc, own_pid: this process has a namespace that is not the machine's. peer_memory: the kernel module that lets
    network cards reach GPU memory, if one is loaded.
    """

    memlock: int | None
    memlock_hard: int | None
    may_lock: bool
    shm_total: int | None
    shm_free: int | None
    memory: int
    cores: int
    ptrace_scope: int | None
    own_ipc: bool
    own_pid: bool
    rdma_devices: tuple[str, ...]
    peer_memory: str


def read_machine_facts() -> MachineFacts:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    total, free = _shm()
    loaded = _names("/sys/module")
    return MachineFacts(
        memlock=_limit(soft),
        memlock_hard=_limit(hard),
        may_lock=_has_capability(_CAP_IPC_LOCK),
        shm_total=total,
        shm_free=free,
        memory=psutil.virtual_memory().total,
        cores=len(os.sched_getaffinity(0)),
        ptrace_scope=_ptrace_scope(),
        own_ipc=_link("/proc/self/ns/ipc") not in ("", _INITIAL_IPC),
        own_pid=_link("/proc/self/ns/pid") not in ("", _INITIAL_PID),
        rdma_devices=_names("/sys/class/infiniband"),
        peer_memory=next((name for name in _PEER_MEMORY_MODULES if name in loaded), ""),
    )


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _shm() -> tuple[int | None, int | None]:
    try:
        sizes = os.statvfs("/dev/shm")
    except OSError:
        return None, None
    if not os.access("/dev/shm", os.W_OK):
        return None, None
    return sizes.f_blocks * sizes.f_frsize, sizes.f_bavail * sizes.f_frsize


def _has_capability(number: int) -> bool:
    for line in _text("/proc/self/status").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False


def _ptrace_scope() -> int | None:
    text = _text("/proc/sys/kernel/yama/ptrace_scope").strip()
    return int(text) if text else None


def _names(folder: str) -> tuple[str, ...]:
    try:
        return tuple(sorted(os.listdir(folder)))
    except OSError:
        return ()


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
