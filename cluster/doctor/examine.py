"""Read all facts, make all checks. Every wait is bounded."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from cluster.client import ApiFailed, Client
from cluster.doctor.children import NoAnswer, ask, ask_probe
from cluster.doctor.cluster_checks import check_cluster, check_server_settings, largest_pool, no_server, no_status
from cluster.doctor.cuda_checks import check_cuda
from cluster.doctor.cuda_facts import CudaFacts
from cluster.doctor.finding import Finding, Report, Section
from cluster.doctor.lane_checks import check_probe, no_probe
from cluster.doctor.machine_checks import check_machine
from cluster.doctor.machine_facts import read_machine_facts
from cluster.doctor.ucx_checks import SYSTEM_UCX, check_ucx, no_ucx
from cluster.doctor.ucx_settings_checks import check_settings
from cluster.doctor.versions import check_versions, read_versions
from cluster.environment import ENVIRONMENT
from cluster.settings import load_settings
from handoff.transports.ucx_facts import UcxFacts
from handoff.transports.ucx_probe import Probe

FACTS_TIMEOUT_S = 15.0
PROBE_TIMEOUT_S = 30.0
STATUS_TIMEOUT_S = 15.0
"""More than the coordinator waits for a silent node."""


def examine(
    url: str | None, environ: Mapping[str, str], server_environ: Mapping[str, str], api_key: str | None = None
) -> Report:
    """url: of a running server, which may want an API key; None checks this machine alone.

    environ: what nodes would be started with. server_environ: what the running server was; empty if unknown.
    """
    status, cluster_findings = _read_status(url, api_key)
    machine = read_machine_facts()
    versions = read_versions()
    ucx, ucx_failure = _read_ucx(environ)
    cuda = _read_cuda(environ)
    probe, probe_findings = _read_probe(environ)
    wants_system = environ.get(SYSTEM_UCX, "false").lower() != "false"
    ucx_findings = check_ucx(ucx, wants_system, machine.rdma_devices, cuda) if ucx else [no_ucx(ucx_failure)]
    pool_bytes = (largest_pool(status) if status else 0) or _default_pool_bytes()
    more = {"ucx": ucx.version if ucx else "", **({"driver": cuda.driver} if cuda.driver else {})}
    return Report(
        (
            Section("UCX", (*ucx_findings, *check_settings(environ))),
            Section("Between two processes of this machine", tuple(probe_findings)),
            Section("Machine", tuple(check_machine(machine, pool_bytes, probe.cma_error if probe else None))),
            Section("GPU", tuple(check_cuda(cuda, versions["torch"], machine.rdma_devices, machine.peer_memory))),
            Section("Running server", (*cluster_findings, *check_server_settings(server_environ))),
            Section("Software", (check_versions({**versions, **more}),)),
        ),
        {"versions": {**versions, **more}, **_plain(ucx=ucx, machine=machine, cuda=cuda, probe=probe)},
    )


def _read_status(url: str | None, api_key: str | None) -> tuple[Mapping[str, Any] | None, list[Finding]]:
    if url is None:
        return None, [no_server()]
    try:
        with Client(url, STATUS_TIMEOUT_S, api_key) as client:
            status = client.get("/cluster/status")
    except ApiFailed as error:
        return None, [no_status(url, str(error))]
    return status, check_cluster(status)


def _read_ucx(environ: Mapping[str, str]) -> tuple[UcxFacts | None, str]:
    try:
        return ask("handoff.transports.ucx_facts", UcxFacts, environ, FACTS_TIMEOUT_S), ""
    except NoAnswer as error:
        return None, str(error)


def _read_cuda(environ: Mapping[str, str]) -> CudaFacts:
    try:
        return ask("cluster.doctor.cuda_facts", CudaFacts, environ, FACTS_TIMEOUT_S)
    except NoAnswer as error:
        # A driver that hangs or crashes is there, and of no use.
        return CudaFacts(error=str(error), driver="of unknown version")


def _read_probe(environ: Mapping[str, str]) -> tuple[Probe | None, list[Finding]]:
    try:
        probe = ask_probe({**ENVIRONMENT, **environ}, PROBE_TIMEOUT_S)
    except NoAnswer as error:
        return None, [no_probe(str(error))]
    return probe, check_probe(probe)


def _plain(**facts: Any) -> dict[str, Any]:
    """Facts as plain data; None for those that could not be had."""
    return {name: None if value is None else asdict(value) for name, value in facts.items()}


def _default_pool_bytes() -> int:
    settings = load_settings(None, {})
    return max(settings.prefill.kv_mib, settings.decode.kv_mib) << 20
