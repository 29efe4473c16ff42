"""A spill folder goes with its process: at once when that ends well, at the next start when it was killed."""

import subprocess
import sys
from pathlib import Path

import pytest

from device.errors import DeviceSetupError
from device.spill_folder import PREFIX, OwnFolder


def test_each_has_its_own_and_takes_it_away(tmp_path: Path) -> None:
    parent = tmp_path / "made" / "for it"
    first, second = OwnFolder(parent), OwnFolder(parent)
    assert first.path != second.path
    assert first.path.stat().st_mode & 0o777 == 0o700
    (first.path / "x").touch()
    first.remove()
    first.remove()
    assert not first.path.exists()
    assert second.path.is_dir()
    second.remove()
    assert not list(parent.iterdir())


def test_what_a_dead_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from device.spill_folder import OwnFolder;"
        " (OwnFolder(Path(sys.argv[1])).path / '0.kv').touch(); os._exit(9)"
    )
    root = Path(__file__).parents[2]
    living = OwnFolder(tmp_path)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=root, check=False)
    assert done.returncode == 9
    (left,) = tmp_path.glob(f"{PREFIX}*/0.kv")
    own = OwnFolder(tmp_path)
    assert not left.parent.exists()
    assert not left.parent.with_suffix(".lock").exists()
    assert living.path.is_dir()
    for folder in (living, own):
        folder.remove()
    assert not list(tmp_path.iterdir())


def test_nothing_else_is_removed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    parent = tmp_path / "spill"
    parent.mkdir()
    (parent / f"{PREFIX}link").symlink_to(precious)
    (parent / f"{PREFIX}link.lock").touch()
    (parent / f"{PREFIX}no-lock").mkdir()
    (parent / f"{PREFIX}starting.lock").touch()
    (parent / "other").mkdir()
    before = sorted(parent.iterdir())
    OwnFolder(parent).remove()
    assert sorted(parent.iterdir()) == before
    assert (precious / "file").exists()


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_place_where_no_folder_can_be_is_a_setup_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DeviceSetupError, match=f"no spill folder can be made in {tmp_path / name}"):
        OwnFolder(tmp_path / name)


def test_a_failed_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr("fcntl.flock", fail)
    with pytest.raises(DeviceSetupError, match="no locks here"):
        OwnFolder(tmp_path)
    assert not list(tmp_path.iterdir())
