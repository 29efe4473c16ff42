"""Made-up facts for the doctor's checks: a machine where everything is well; tests replace what they spoil."""

from dataclasses import asdict
from typing import Any

from cluster.doctor.cuda_facts import CudaFacts
from cluster.doctor.finding import Finding, Level
from cluster.doctor.machine_facts import MachineFacts
from handoff.compatibility import LAYOUT, Compatibility
from handoff.transports.ucx_facts import UcxFacts
from handoff.transports.ucx_probe import Probe, Rate

GIB = 1 << 30

UCX = UcxFacts(
    version="1.21.0",
    path="/venv/libucx/lib/libucp.so",
    from_wheel=True,
    modules=("cma", "cuda"),
    lanes=("self/memory", "tcp/lo", "sysv/memory", "posix/memory", "cma/memory"),
)
NO_CUDA = CudaFacts(error="libcuda.so.1: no such file")
CUDA = CudaFacts(driver="580.82.07", version="13.0", devices=("NVIDIA H100", "NVIDIA H100"), dmabuf=True)
MACHINE = MachineFacts(
    memlock=8 << 20,
    memlock_hard=8 << 20,
    may_lock=False,
    shm_total=8 * GIB,
    shm_free=7 * GIB,
    memory=64 * GIB,
    cores=8,
    ptrace_scope=1,
    own_ipc=False,
    own_pid=False,
    rdma_devices=(),
    peer_memory="",
)
PROBE = Probe(
    lane="cma",
    warning=None,
    rates=(Rate(2 << 20, ours=10e9, memcpy=12e9), Rate(64 << 10, ours=8e9, memcpy=16e9)),
    cma_error="",
    intact=True,
)
COMPATIBILITY = Compatibility(
    protocol=1, model_digest="m", dtype="bf16", layout=LAYOUT, layers=30, kv_heads=3, head_dim=64, block_size=16
)


def node(name: str, role: str, peer: str, lane: str = "cma", warning: str | None = None) -> dict[str, Any]:
    """A node's line in /cluster/status, as far as the doctor reads it."""
    return {
        "node": name,
        "role": role,
        "compatibility": asdict(COMPATIBILITY),
        "device": {"total_blocks": 100, "block_bytes": 1 << 20},
        "links": [{"peer": peer, "lane": lane, "warning": warning}],
    }


def levels(findings: list[Finding]) -> set[Level]:
    return {finding.level for finding in findings}


def only_bad(findings: list[Finding]) -> Finding:
    """The one finding that is bad; every bad one must say what to do."""
    (finding,) = [finding for finding in findings if finding.is_bad]
    assert finding.what_to_do
    return finding
