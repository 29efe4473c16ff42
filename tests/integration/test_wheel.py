"""The wheel alone, from an empty folder: every package, the configs, the command."""

import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

PROJECT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(PROJECT)], check=True, timeout=120)
    return next(folder.glob("prelay-*.whl"))


def test_it_holds_packages_and_configs_and_nothing_else(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in ZipFile(wheel).namelist()}
    packages = {"cluster", "prefill_node", "decode_node", "handoff", "device", "scheduler"}
    data = {name for name in tops if name.startswith("prelay-")}
    assert tops - data == packages
    assert any(name.endswith("share/prelay/configs/serve.yaml") for name in ZipFile(wheel).namelist())


def test_it_runs_from_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    target, empty = tmp_path / "installed", tmp_path / "empty"
    empty.mkdir()
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel)]
    subprocess.run(command, check=True, timeout=120)
    script = (
        "import cluster, cluster.launch, cluster.cli, handoff.packaging as p; p.check_packages(); "
        "print(cluster.__file__); cluster.cli.main()"
    )
    result = subprocess.run(
        [sys.executable, "-P", "-c", script, "version"],
        cwd=empty,
        env={**os.environ, "PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert str(target) in result.stdout
    assert "0.1.0" in result.stdout
