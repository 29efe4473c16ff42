"""Environment variables that spoil what Prelay sets for UCX, or slow UCX down."""

from collections.abc import Mapping
from fnmatch import fnmatchcase

from cluster.doctor.finding import Finding, Level
from handoff.transports.ucx_env import NEEDED_FOR_SHARED_MEMORY, SETTINGS

_OFF = ("n", "no", "0", "off")
_PUT_PROTOCOLS = ("rndv/put/zcopy", "rndv/put/mtype")
_SEGMENTS = {"posix", "sysv"}
_LOCAL = _SEGMENTS | {"cma"}
_ALIASES = {"all": _LOCAL, "shm": _LOCAL, "sm": _LOCAL}
_NOISY = ("debug", "trace", "data", "func", "poll")
_PUT_RISK = "the sender could write into blocks that the receiver has given to another request"


def check_settings(environ: Mapping[str, str]) -> list[Finding]:
    """environ: of the process that starts nodes, before Prelay adds its own."""
    findings = [
        *_shared_memory(environ),
        *_cma(environ),
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


def allowed_transports(tls: str) -> set[str]:
    """Those of this machine's own transports that a value of UCX_TLS lets UCX use; a leading ^ excludes the rest."""
    listed = {name.strip().lstrip("\\") for name in tls.removeprefix("^").split(",")}
    named = set[str]().union(*(_ALIASES.get(name, {name}) for name in listed))
    return _LOCAL - named if tls.startswith("^") else _LOCAL & named


def _shared_memory(environ: Mapping[str, str]) -> list[Finding]:
    title = "Shared memory is left out"
    tls = environ.get("UCX_TLS")
    if tls is not None and not allowed_transports(tls) & _SEGMENTS:
        what = f"UCX_TLS={tls} leaves shared memory out: nodes on one machine would use TCP, ten times slower."
        return [Finding(Level.SLOW, title, what, "Unset UCX_TLS, or add shm to it.")]
    if all(_is_off(environ, name) for name in NEEDED_FOR_SHARED_MEMORY):
        names = " and ".join(NEEDED_FOR_SHARED_MEMORY)
        what = f"{names} are off: nodes on one machine would use TCP, ten times slower."
        return [Finding(Level.SLOW, title, what, f"Unset {names}.")]
    return []


def _cma(environ: Mapping[str, str]) -> list[Finding]:
    title = "CMA is left out"
    tls = environ.get("UCX_TLS")
    allowed = _LOCAL if tls is None else allowed_transports(tls)
    if allowed & _SEGMENTS and "cma" not in allowed:
        what = f"UCX_TLS={tls} leaves CMA out: every byte between nodes on one machine would be copied twice."
        return [Finding(Level.SLOW, title, what, "Unset UCX_TLS, or add cma to it.")]
    if _is_off(environ, "UCX_CMA_MEMORY_INVALIDATE"):
        what = "UCX_CMA_MEMORY_INVALIDATE is off: every byte between nodes on one machine would be copied twice."
        return [Finding(Level.SLOW, title, what, "Unset UCX_CMA_MEMORY_INVALIDATE.")]
    return []


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


def _is_off(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "y").lower() in _OFF
