"""Environment variables that spoil what Prelay sets for UCX, or slow UCX down."""

from collections.abc import Mapping
from fnmatch import fnmatchcase

from cluster.doctor.finding import Finding, Level
from handoff.transports.shared_pool import SETTING, shared_pools_allowed
from handoff.transports.ucx_env import SETTINGS

_OFF = ("n", "no", "0", "off")
_PUT_PROTOCOLS = ("rndv/put/zcopy", "rndv/put/mtype")
_SEGMENTS = {"posix", "sysv"}
_ALIASES = ("all", "shm", "sm", "mm")
_NOISY = ("debug", "trace", "data", "func", "poll")
_PUT_RISK = "the sender could write into blocks that the receiver has given to another request"


def check_settings(environ: Mapping[str, str]) -> list[Finding]:
    """environ: of the process that starts nodes, before Prelay adds its own."""
    findings = [
        *_shared_memory(environ),
        *_shared_pools(environ),
        *_puts(environ),
        *_rendezvous(environ),
        *_log_level(environ),
    ]
    return [_set_by_prelay(environ), *(findings or [_no_spoilers(environ)])]


def _set_by_prelay(environ: Mapping[str, str]) -> Finding:
    added = " ".join(f"{name}={value}" for name, value in SETTINGS.items() if name not in environ)
    return Finding(Level.OK, "Settings of Prelay's", f"Each node sets {added or 'none: you have set them all'}.")


def _no_spoilers(environ: Mapping[str, str]) -> Finding:
    yours = " ".join(f"{name}={value}" for name, value in sorted(environ.items()) if name.startswith("UCX_"))
    what = f"These of yours do no harm: {yours}." if yours else "You have set no UCX_* variable."
    return Finding(Level.OK, "Settings of yours", what)


def allowed_segments(tls: str) -> set[str]:
    """The kinds of shared memory that a value of UCX_TLS lets UCX use; a leading ^ excludes the rest."""
    listed = {name.strip().lstrip("\\") for name in tls.removeprefix("^").split(",")}
    named = set[str]().union(*(_SEGMENTS if name in _ALIASES else {name} for name in listed))
    return _SEGMENTS - named if tls.startswith("^") else _SEGMENTS & named


def _shared_memory(environ: Mapping[str, str]) -> list[Finding]:
    """UCX uses it only where error handling is on, which nodes need."""
    tls = environ.get("UCX_TLS")
    if tls is None:
        return []
    used = [name for name in sorted(allowed_segments(tls)) if not _is_off(environ, _error_handling(name), "n")]
    if not used:
        return []
    what = (
        f"UCX_TLS={tls} with {_error_handling(used[0])} lets UCX use shared memory of its own, where a process that is"
        " killed while it writes blocks the others for ever. Nodes of one machine don't need it."
    )
    return [Finding(Level.SLOW, "UCX uses its shared memory", what, "Unset UCX_TLS, or set it to ^sm.")]


def _error_handling(segment: str) -> str:
    return f"UCX_{segment.upper()}_ERROR_HANDLING"


def _shared_pools(environ: Mapping[str, str]) -> list[Finding]:
    if shared_pools_allowed(environ):
        return []
    what = f"{SETTING}={environ[SETTING]}: bytes between nodes on one machine go by TCP, ten times slower than a copy."
    return [Finding(Level.SLOW, "Nodes don't read each other's pools", what, f"Unset {SETTING}.")]


def _puts(environ: Mapping[str, str]) -> list[Finding]:
    title = "The sender may write into the receiver's memory"
    if _is_off(environ, "UCX_PROTO_ENABLE"):
        what = f"UCX_PROTO_ENABLE is off, which makes UCX ignore UCX_PROTOS: {_PUT_RISK}."
        return [Finding(Level.BROKEN, title, what, "Unset UCX_PROTO_ENABLE.")]
    protos = environ.get("UCX_PROTOS")
    if protos is None or not allows_puts(protos):
        return []
    todo = f"Unset UCX_PROTOS, or let it exclude puts: {SETTINGS['UCX_PROTOS']}."
    return [Finding(Level.BROKEN, title, f"UCX_PROTOS={protos} allows a put rendezvous: {_PUT_RISK}.", todo)]


def allows_puts(protos: str) -> bool:
    """Whether a value of UCX_PROTOS lets UCX use a rendezvous in which the sender writes."""
    excluding = protos.startswith("^")
    patterns = [pattern.strip() for pattern in protos.removeprefix("^").split(",")]
    matched = [any(pattern == "all" or fnmatchcase(name, pattern) for pattern in patterns) for name in _PUT_PROTOCOLS]
    return not all(matched) if excluding else any(matched)


def _rendezvous(environ: Mapping[str, str]) -> list[Finding]:
    findings = []
    scheme = environ.get("UCX_RNDV_SCHEME", "auto")
    if scheme != "auto":
        what = f"UCX_RNDV_SCHEME={scheme} forces one way to move large blocks, and some lanes can't take it."
        findings.append(Finding(Level.SLOW, "Rendezvous is forced", what, "Unset UCX_RNDV_SCHEME."))
    threshold = environ.get("UCX_RNDV_THRESH", "auto")
    if threshold.lower() in ("inf", "-1"):
        what = f"UCX_RNDV_THRESH={threshold} switches rendezvous off: blocks would be copied through small buffers."
        findings.append(Finding(Level.SLOW, "Rendezvous is off", what, "Unset UCX_RNDV_THRESH."))
    return findings


def _log_level(environ: Mapping[str, str]) -> list[Finding]:
    level = environ.get("UCX_LOG_LEVEL", "warn").lower()
    if not level.startswith(_NOISY):
        return []
    what = f"UCX_LOG_LEVEL={level} makes UCX write about every message."
    return [Finding(Level.SLOW, "UCX writes a log", what, "Unset UCX_LOG_LEVEL.")]


def _is_off(environ: Mapping[str, str], name: str, default: str = "y") -> bool:
    return environ.get(name, default).lower() in _OFF
