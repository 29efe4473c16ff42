"""The doctor on the machine, its GPUs and the installed software."""

from dataclasses import replace

import pytest
from doctor_facts import CUDA, GIB, MACHINE, NO_CUDA, levels, only_bad

from cluster.doctor.cuda_checks import check_cuda
from cluster.doctor.cuda_facts import CudaFacts
from cluster.doctor.finding import Level
from cluster.doctor.machine_checks import (
    LEAST_SHM_BYTES,
    check_cma,
    check_machine,
    check_memlock,
    check_namespaces,
    check_shm,
)
from cluster.doctor.versions import check_versions

RDMA = replace(MACHINE, rdma_devices=("mlx5_0",))
TORCH = "2.13.0+cu130"
VERSIONS = {"prelay": "0.1.0", "torch": "2.13.0", "ucxx": "0.52.0", "python": "3.11.7"}


def test_a_machine_where_all_is_well() -> None:
    assert levels(check_machine(MACHINE, GIB, "")) == {Level.OK, Level.NOTE}
    assert len(check_machine(MACHINE, GIB, "")) == 4
    assert len(check_machine(MACHINE, GIB, None)) == 3


def test_the_memlock_limit_does_not_matter_without_rdma() -> None:
    finding = check_memlock(MACHINE, GIB)
    assert finding.level is Level.NOTE
    assert "8 MiB" in finding.what
    assert "RDMA only" in finding.what


def test_a_memlock_limit_below_the_pool() -> None:
    finding = only_bad([check_memlock(RDMA, GIB)])
    assert finding.level is Level.BROKEN
    assert "8 MiB" in finding.what
    assert "1 GiB" in finding.what
    assert "limits.conf" in finding.what_to_do
    raisable = only_bad([check_memlock(replace(RDMA, memlock_hard=None), GIB)])
    assert "ulimit -S -l hard" in raisable.what_to_do


@pytest.mark.parametrize("enough", [{"memlock": None}, {"memlock": GIB}, {"may_lock": True}])
def test_a_memlock_limit_that_does_not_bind(enough: dict[str, int | bool | None]) -> None:
    assert check_memlock(replace(RDMA, **enough), GIB).level is Level.OK  # type: ignore[arg-type]


def test_shared_memory_that_is_small_full_or_missing() -> None:
    assert check_shm(replace(MACHINE, shm_free=LEAST_SHM_BYTES)).level is Level.OK
    small = only_bad([check_shm(replace(MACHINE, shm_total=64 << 20, shm_free=63 << 20))])
    assert "63 MiB of 64 MiB are free" in small.what
    assert "--shm-size" in small.what_to_do
    assert "Remove what fills it" in only_bad([check_shm(replace(MACHINE, shm_free=LEAST_SHM_BYTES - 1))]).what_to_do
    assert "missing" in only_bad([check_shm(replace(MACHINE, shm_total=None, shm_free=None))]).what


def test_cma_that_was_tried() -> None:
    assert check_cma(1, "").level is Level.OK
    by_yama = only_bad([check_cma(2, "Operation not permitted")])
    assert "Operation not permitted" in by_yama.what
    assert "kernel.yama.ptrace_scope=0" in by_yama.what_to_do
    without_yama = only_bad([check_cma(None, "Operation not permitted")])
    assert "ptrace_scope" not in without_yama.what_to_do
    assert "SYS_PTRACE" in without_yama.what_to_do


def test_namespaces_of_a_container() -> None:
    assert check_namespaces(MACHINE).level is Level.OK
    finding = check_namespaces(replace(MACHINE, own_ipc=True, own_pid=True))
    assert finding.level is Level.NOTE
    assert "IPC and PID namespaces" in finding.what
    assert "--ipc=host" in finding.what_to_do
    assert "PID namespace of" in check_namespaces(replace(MACHINE, own_pid=True)).what


def test_no_gpu_is_no_fault() -> None:
    (finding,) = check_cuda(NO_CUDA, "2.13.0+cpu", (), "")
    assert finding.level is Level.NOTE


def test_a_driver_without_cuda() -> None:
    finding = only_bad(check_cuda(CudaFacts(error="cuInit: no device (100)", driver="580.1"), TORCH, (), ""))
    assert "cuInit: no device (100)" in finding.what
    assert "--gpus all" in finding.what_to_do


def test_a_gpu_in_order() -> None:
    findings = check_cuda(CUDA, TORCH, ("mlx5_0",), "nvidia_peermem")
    assert levels(findings) == {Level.OK}
    assert "2 x NVIDIA H100, CUDA 13.0, driver 580.82.07" in findings[0].what
    assert "nvidia_peermem" in findings[2].what
    assert check_cuda(CUDA, TORCH, (), "")[2].level is Level.NOTE
    by_dmabuf = check_cuda(CUDA, TORCH, ("mlx5_0",), "")[2]
    assert (by_dmabuf.level, "by dmabuf" in by_dmabuf.what) == (Level.OK, True)


def test_a_gpu_that_torch_was_not_built_for() -> None:
    assert "built without CUDA" in only_bad(check_cuda(CUDA, "2.13.0+cpu", (), "")).what


def test_gpu_memory_that_can_not_be_shared() -> None:
    finding = only_bad(check_cuda(replace(CUDA, ipc_error="cuIpcGetMemHandle: not supported (801)"), TORCH, (), ""))
    assert finding.title == "CUDA IPC"
    assert "not supported (801)" in finding.what


def test_gpu_memory_that_the_network_card_can_not_reach() -> None:
    finding = only_bad(check_cuda(replace(CUDA, dmabuf=False), TORCH, ("mlx5_0",), ""))
    assert finding.title == "GPUDirect RDMA"
    assert "modprobe nvidia_peermem" in finding.what_to_do


def test_versions() -> None:
    finding = check_versions(VERSIONS)
    assert finding.level is Level.OK
    assert "torch 2.13.0, ucxx 0.52.0" in finding.what
    assert only_bad([check_versions({**VERSIONS, "ucxx": ""})]).what.startswith("ucxx can't be found")
    assert check_versions({**VERSIONS, "prelay": ""}).level is Level.OK
