"""The guard against other distributions that own one of our import names (PyPI has a `scheduler`, a `cluster`, ...)."""

from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("cluster", "prefill_node", "decode_node", "handoff", "device", "scheduler")


class ShadowedPackage(RuntimeError):
    """Another distribution's package stands in for one of ours: uninstall it, or use a fresh environment."""


def check_packages() -> None:
    """Raises ShadowedPackage unless all our packages lie in one parent folder."""
    parents = {name: _parent(name) for name in PACKAGES}
    home = parents["handoff"]
    foreign = {name: parent for name, parent in parents.items() if parent != home}
    if foreign:
        found = ", ".join(f"{name} in {parent}" for name, parent in foreign.items())
        raise ShadowedPackage(
            f"Prelay lies in {home}, but Python finds {found}: uninstall the other distribution "
            "or install prelay into a fresh virtual environment"
        )


def _parent(name: str) -> Path | None:
    spec = find_spec(name)
    return None if spec is None or spec.origin is None else Path(spec.origin).resolve().parents[1]
