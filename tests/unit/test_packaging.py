"""All our packages come from one place, and a foreign one in between is named."""

import sys
from pathlib import Path

import pytest

from handoff.packaging import PACKAGES, ShadowedPackage, check_packages


def test_all_packages_lie_in_one_folder() -> None:
    check_packages()


def test_a_foreign_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "scheduler", raising=False)
    with pytest.raises(ShadowedPackage, match="scheduler in "):
        check_packages()


def test_the_wheel_ships_every_package() -> None:
    project = Path(__file__).parents[2]
    folders = {path.parent.name for path in project.glob("*/__init__.py")}
    assert folders == set(PACKAGES)
