"""Versions of what matters, and what is missing."""

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from cluster.doctor.finding import Finding, Level

_NAMES = ("prelay", "torch", "transformers", "ray")
_ONE_OF = ("ucxx-cu12", "ucxx-cu13", "ucxx")


def read_versions() -> dict[str, str]:
    """Version by name of the distribution; empty for one that isn't installed."""
    found = {name: _version(name) for name in _NAMES}
    found["ucxx"] = next((number for name in _ONE_OF if (number := _version(name))), "")
    return {**found, "python": platform.python_version()}


def check_versions(versions: Mapping[str, str]) -> Finding:
    """versions: see `read_versions`; others may be added."""
    missing = [name for name, number in versions.items() if not number and name != "prelay"]
    listed = ", ".join(f"{name} {number or 'missing'}" for name, number in versions.items())
    if missing:
        what = f"{' and '.join(missing)} can't be found ({listed})."
        return Finding(Level.BROKEN, "Versions", what, "Install Prelay anew, into a fresh virtual environment.")
    return Finding(Level.OK, "Versions", f"{listed}.")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
