"""Limits of this machine and of this process that break or slow serving."""

from cluster.doctor.finding import Finding, Level
from cluster.doctor.machine_facts import MachineFacts

LEAST_SHM_BYTES = 256 << 20
"""Ray's object store (80 MiB) and UCX's segments of some nodes, with room to spare."""


def check_machine(facts: MachineFacts, pool_bytes: int, cma_error: str | None) -> list[Finding]:
    """pool_bytes: the largest KV pool of a node. cma_error: see `Probe`; None if it could not be tried."""
    findings = [check_memlock(facts, pool_bytes), check_shm(facts), check_namespaces(facts)]
    if cma_error is not None:
        findings.insert(2, check_cma(facts.ptrace_scope, cma_error))
    return findings


def check_memlock(facts: MachineFacts, pool_bytes: int) -> Finding:
    limit = "unlimited" if facts.memlock is None else _size(facts.memlock)
    title = "Locked memory (RLIMIT_MEMLOCK)"
    if not facts.rdma_devices:
        return Finding(Level.NOTE, title, f"The limit is {limit}. It matters to RDMA only, which this machine lacks.")
    if facts.memlock is None or facts.may_lock or facts.memlock >= pool_bytes:
        why = " and does not bind this process (CAP_IPC_LOCK)" if facts.may_lock and facts.memlock is not None else ""
        return Finding(Level.OK, title, f"The limit is {limit}{why}; RDMA registers a KV pool of {_size(pool_bytes)}.")
    what = f"The limit is {limit}, but RDMA must register a KV pool of {_size(pool_bytes)}, and would fail."
    hard = facts.memlock_hard
    raise_it = "`ulimit -S -l hard` before you start Prelay"
    if hard is not None and hard < pool_bytes:
        raise_it = (
            "`* - memlock unlimited` in /etc/security/limits.conf and a new login; "
            "LimitMEMLOCK=infinity for systemd; --ulimit memlock=-1 for Docker"
        )
    return Finding(Level.BROKEN, title, what, f"Raise it: {raise_it}.")


def check_shm(facts: MachineFacts) -> Finding:
    title = "Shared memory (/dev/shm)"
    todo = "Enlarge it: --shm-size=1g for Docker, an emptyDir with medium Memory on /dev/shm for Kubernetes."
    if facts.shm_total is None or facts.shm_free is None:
        what = "/dev/shm is missing or can't be written, so nodes of one machine can't use shared memory."
        return Finding(Level.SLOW, title, what, todo)
    sizes = f"{_size(facts.shm_free)} of {_size(facts.shm_total)} are free"
    if facts.shm_free < LEAST_SHM_BYTES:
        what = f"{sizes}; Ray and UCX need {_size(LEAST_SHM_BYTES)}, or they fall back to files and TCP, or fail."
        if facts.shm_total >= LEAST_SHM_BYTES:
            todo = "Remove what fills it (see `ls -l /dev/shm`), or enlarge it."
        return Finding(Level.SLOW, title, what, todo)
    return Finding(Level.OK, title, f"{sizes}.")


def check_cma(ptrace_scope: int | None, cma_error: str) -> Finding:
    """CMA: one process reads another's memory, with process_vm_readv."""
    title = "Reading another process's memory (CMA)"
    scope = "Yama is not in use" if ptrace_scope is None else f"ptrace_scope is {ptrace_scope}"
    if not cma_error:
        return Finding(Level.OK, title, f"Tried between two processes: it works; {scope}.")
    what = f"process_vm_readv between two processes fails ({cma_error}); {scope}. Blocks are then copied twice."
    todo = "Containers: allow it with --cap-add=SYS_PTRACE, and check the seccomp profile."
    if ptrace_scope:
        todo = f"Run `sysctl kernel.yama.ptrace_scope=0`. {todo}"
    return Finding(Level.SLOW, title, what, todo)


def check_namespaces(facts: MachineFacts) -> Finding:
    title = "Namespaces"
    own = [name for name, is_own in (("IPC", facts.own_ipc), ("PID", facts.own_pid)) if is_own]
    if not own:
        return Finding(Level.OK, title, "IPC and PID namespaces are the machine's.")
    what = (
        f"This is a container with {' and '.join(own)} namespace{'s' if len(own) > 1 else ''} of its own. Nodes inside "
        "it share memory; nodes in other containers of this machine are reached by TCP."
    )
    todo = "If nodes run in several containers: --ipc=host --pid=host, or one pod with shareProcessNamespace."
    return Finding(Level.NOTE, title, what, todo)


def _size(count: int) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20)):
        if count >= 1 << shift:
            return f"{count / (1 << shift):.1f}".removesuffix(".0") + f" {unit}"
    return f"{count >> 10} KiB"
