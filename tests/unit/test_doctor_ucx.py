"""The doctor on UCX: what is loaded, what it sees, settings that spoil it, and the trial between two processes."""

from dataclasses import replace

import pytest
from doctor_facts import CUDA, NO_CUDA, PROBE, UCX, levels, only_bad

from cluster.doctor.finding import Level
from cluster.doctor.lane_checks import check_probe, no_probe
from cluster.doctor.ucx_checks import check_ucx, no_ucx
from cluster.doctor.ucx_settings_checks import allowed_segments, allows_puts, check_settings
from handoff.transports.ucx_env import SETTINGS
from handoff.transports.ucx_facts import lanes_in, library_in, modules_in
from handoff.transports.ucx_probe import Rate

CONTEXT = """
#      resource 0  :  md 0  dev 0  flags -- self/memory
#      resource 12 :  md 1  dev 2  flags -- tcp/lo
#      resource 13 :  md 2  dev 3  flags -s rc_mlx5/mlx5_0:1
"""


def test_ucx_of_the_wheel_is_fine_without_rdma() -> None:
    findings = check_ucx(UCX, False, (), NO_CUDA)
    assert levels(findings) == {Level.OK, Level.NOTE}
    loaded = findings[0].what
    assert "UCX 1.21.0 of the Python wheel" in loaded
    assert "built without ib and rdmacm" in loaded
    assert "/venv/libucx/lib/libucp.so" in loaded
    assert "posix/memory" in findings[1].what


def test_a_system_ucx_that_was_asked_for_and_not_found() -> None:
    finding = only_bad(check_ucx(UCX, True, (), NO_CUDA))
    assert finding.title == "Not the UCX you asked for"
    assert levels(check_ucx(replace(UCX, from_wheel=False), True, (), NO_CUDA)) == {Level.OK, Level.NOTE}


def test_an_rdma_device_that_ucx_was_not_built_for() -> None:
    finding = only_bad(check_ucx(UCX, False, ("mlx5_0",), NO_CUDA))
    assert finding.level is Level.SLOW
    assert "mlx5_0" in finding.what
    assert "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true" in finding.what_to_do


def test_an_rdma_device_that_ucx_can_not_use() -> None:
    with_verbs = replace(UCX, modules=("cma", "ib", "rdmacm"), from_wheel=False)
    assert "can use none of them" in only_bad(check_ucx(with_verbs, False, ("mlx5_0",), NO_CUDA)).what
    using = replace(with_verbs, lanes=(*UCX.lanes, "rc_mlx5/mlx5_0:1"))
    assert levels(check_ucx(using, False, ("mlx5_0",), NO_CUDA)) == {Level.OK}


def test_ucx_without_any_device() -> None:
    assert only_bad(check_ucx(replace(UCX, lanes=()), False, (), NO_CUDA)).level is Level.BROKEN


@pytest.mark.parametrize(
    ("has", "level"), [(("cuda_copy", "cuda_ipc"), None), (("cuda_copy",), Level.SLOW), ((), Level.BROKEN)]
)
def test_a_gpu_that_ucx_leaves_out(has: tuple[str, ...], level: Level | None) -> None:
    ucx = replace(UCX, lanes=(*UCX.lanes, *(f"{name}/cuda" for name in has)))
    findings = check_ucx(ucx, False, (), CUDA)
    if level is None:
        assert levels(findings) == {Level.OK, Level.NOTE}
    else:
        assert only_bad(findings).level is level


def test_ucx_that_does_not_start() -> None:
    assert "no libucp" in only_bad([no_ucx("no libucp.")]).what


def test_lanes_modules_and_library_are_read() -> None:
    assert lanes_in(CONTEXT) == ("self/memory", "tcp/lo", "rc_mlx5/mlx5_0:1")
    assert modules_in(["libuct_ib.so.0", "libuct_ib.so", "libuct_cma.la", "libuct_rdmacm.so", "libucm_cuda.so"]) == (
        "ib",
        "rdmacm",
    )
    assert library_in("7f00 r-xp 00:00 1   /opt/ucx/lib/libucp.so.0.0.0\n") == "/opt/ucx/lib/libucp.so.0.0.0"
    assert library_in("7f00 r-xp 00:00 1   /lib/libc.so.6\n") == ""


@pytest.mark.parametrize(
    "environ",
    [
        {},
        SETTINGS,
        {"UCX_TLS": "all"},
        {"UCX_TLS": "tcp"},
        {"UCX_TLS": "^sm,ud", "UCX_POSIX_ERROR_HANDLING": "y"},
        {"UCX_TLS": "posix,tcp", "UCX_SYSV_ERROR_HANDLING": "y"},
        {"PRELAY_SHARED_POOLS": "y"},
        {"UCX_PROTOS": "^rndv/put/zcopy,rndv/put/mtype"},
        {"UCX_POSIX_ERROR_HANDLING": "n"},
        {"UCX_RNDV_SCHEME": "auto", "UCX_RNDV_THRESH": "8k", "UCX_LOG_LEVEL": "info", "HOME": "/root"},
    ],
)
def test_settings_that_do_no_harm(environ: dict[str, str]) -> None:
    assert levels(check_settings(environ)) == {Level.OK}


@pytest.mark.parametrize(
    ("environ", "level", "title"),
    [
        ({"UCX_TLS": "all", "UCX_POSIX_ERROR_HANDLING": "y"}, Level.SLOW, "UCX uses its shared memory"),
        ({"UCX_TLS": "^posix", "UCX_SYSV_ERROR_HANDLING": "y"}, Level.SLOW, "UCX uses its shared memory"),
        ({"PRELAY_SHARED_POOLS": "n"}, Level.SLOW, "Nodes don't read each other's pools"),
        ({"UCX_PROTOS": "all"}, Level.BROKEN, "The sender may write into the receiver's memory"),
        ({"UCX_PROTOS": "^rndv/get/*"}, Level.BROKEN, "The sender may write into the receiver's memory"),
        ({"UCX_PROTO_ENABLE": "n"}, Level.BROKEN, "The sender may write into the receiver's memory"),
        ({"UCX_RNDV_SCHEME": "get_zcopy"}, Level.SLOW, "Rendezvous is forced"),
        ({"UCX_RNDV_THRESH": "inf"}, Level.SLOW, "Rendezvous is off"),
        ({"UCX_LOG_LEVEL": "TRACE_DATA"}, Level.SLOW, "UCX writes a log"),
    ],
)
def test_settings_that_spoil(environ: dict[str, str], level: Level, title: str) -> None:
    finding = only_bad(check_settings(environ))
    assert (finding.level, finding.title) == (level, title)
    assert any(name in finding.what and name in finding.what_to_do for name in environ)


def test_what_prelay_sets_is_told() -> None:
    assert "UCX_PROTOS=^rndv/put/*" in check_settings({})[0].what
    assert "UCX_PROTOS" not in check_settings({"UCX_PROTOS": "^rndv/put/*"})[0].what


def test_values_of_ucx_tls() -> None:
    assert allowed_segments("sm") == {"posix", "sysv"}
    assert allowed_segments("\\posix,tcp") == {"posix"}
    assert allowed_segments("^posix") == {"sysv"}
    assert allowed_segments("^mm") == set()


def test_values_of_ucx_protos() -> None:
    assert not allows_puts("^rndv/*")
    assert not allows_puts("eager/*,rndv/get/*")
    assert allows_puts("^rndv/put/zcopy")
    assert allows_puts("rndv/*")


def test_a_fast_lane_is_fine() -> None:
    findings = check_probe(PROBE)
    assert levels(findings) == {Level.OK}
    assert "cma" in findings[0].title
    assert levels(check_probe(replace(PROBE, lane="shm"))) == {Level.OK}
    assert findings[1].what == "10.0 GB/s, 0.83 of memcpy in one process (12.0 GB/s)."
    assert findings[2].title == "Speed, 64 KiB blocks"


def test_tcp_between_processes_of_one_machine() -> None:
    finding = only_bad(check_probe(replace(PROBE, lane="tcp", warning="PRELAY_SHARED_POOLS=n forbids it.")))
    assert finding.level is Level.SLOW
    assert finding.what == "PRELAY_SHARED_POOLS=n forbids it."
    assert "one by one" in only_bad(check_probe(replace(PROBE, lane="tcp", warning=None))).what


def test_a_share_of_memcpy_under_the_threshold() -> None:
    just_enough = replace(PROBE, rates=(Rate(2 << 20, ours=5e9, memcpy=10e9),))
    assert levels(check_probe(just_enough)) == {Level.OK}
    finding = only_bad(check_probe(replace(PROBE, rates=(Rate(2 << 20, ours=4.9e9, memcpy=10e9),))))
    assert finding.level is Level.SLOW
    assert "0.49 of memcpy" in finding.what
    assert "0.50 is expected" in finding.what


def test_slow_tcp_asks_for_the_lane_first() -> None:
    slow = replace(PROBE, lane="tcp", rates=(Rate(2 << 20, ours=1e9, memcpy=10e9),))
    assert check_probe(slow)[1].what_to_do == "Put the lane right first."


def test_bytes_that_change_on_the_way() -> None:
    assert only_bad(check_probe(replace(PROBE, intact=False))).level is Level.BROKEN


def test_a_trial_that_fails() -> None:
    finding = only_bad([no_probe("no answer within 30 s.")])
    assert finding.level is Level.BROKEN
    assert "no answer within 30 s" in finding.what
