"""The lane between two processes of this machine, and how fast it is beside memcpy."""

from cluster.doctor.finding import Finding, Level
from device.host_memory import SETTING as POOL_SETTING
from handoff.transports.shared_pool import SETTING
from handoff.transports.ucx_probe import Probe, Rate

LEAST_SHARE = {2 << 20: 0.5, 64 << 10: 0.25}
"""Of memcpy's speed, by block length. In rounds as short as the trial's, a receiver that copies by itself reaches
0.7 to 1.0 and 0.5 to 0.9; TCP 0.1 and 0.08."""
UNKNOWN_LEAST_SHARE = 0.25


def check_probe(probe: Probe) -> list[Finding]:
    """probe: what two processes measured."""
    findings = [_lane(probe), *(_speed(rate, probe.lane) for rate in probe.rates)]
    if not probe.intact:
        what = "The bytes that arrived are not those that were sent."
        findings.append(Finding(Level.BROKEN, "Bytes change on the way", what, "Reinstall UCX; test the memory."))
    return findings


def no_probe(reason: str) -> Finding:
    """The two processes could not exchange anything."""
    return Finding(
        Level.BROKEN,
        "Two processes can't exchange blocks",
        f"The trial between two processes of this machine failed: {reason}",
        "Unset UCX_* variables that you don't need; check that there is free memory and room in /dev/shm.",
    )


def _lane(probe: Probe) -> Finding:
    title = f"Lane between two processes: {probe.lane}"
    if probe.lane == "shm":
        return Finding(Level.OK, title, "The receiver has mapped the sender's pool and copies from it.")
    if probe.lane == "cma":
        return Finding(Level.OK, title, "The receiver copies blocks straight from the sender's memory.")
    what = probe.warning or "UCX carries the blocks one by one: the receiver could not reach the sender's pool."
    todo = f"Unset {SETTING}; see CMA in this report, or set {POOL_SETTING}=shared, which needs no CMA."
    return Finding(Level.SLOW, title, what, todo)


def _speed(rate: Rate, lane: str) -> Finding:
    share = rate.ours / rate.memcpy
    title = f"Speed, {_size(rate.block)} blocks"
    measured = f"{rate.ours / 1e9:.1f} GB/s, {share:.2f} of memcpy in one process ({rate.memcpy / 1e9:.1f} GB/s)"
    least = LEAST_SHARE.get(rate.block, UNKNOWN_LEAST_SHARE)
    if share >= least:
        return Finding(Level.OK, title, f"{measured}.")
    todo = "Look for other load on the machine (two free cores are needed), and run this again."
    if lane == "tcp":
        todo = "Put the lane right first."
    return Finding(Level.SLOW, title, f"{measured}; at least {least:.2f} is expected.", todo)


def _size(length: int) -> str:
    return f"{length >> 20} MiB" if length >= 1 << 20 else f"{length >> 10} KiB"
