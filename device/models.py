"""The model store: from a model's name to a folder of safetensors that transformers can load.

A folder under `home/models` is complete as soon as it has its final name: it is built under another name and
renamed. A build that died leaves only a `.partial-*` folder, which the next build of the same model removes.
This module imports neither torch nor transformers, so that a command line can resolve a name quickly.
"""

import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from device.errors import ModelDownloadFailed, ModelError, ModelNotFound, ModelUnsupported
from device.published import ensure_folder
from device.wheel_models import SMOLLM2, fetch_gguf

__all__ = [
    "ModelDownloadFailed",
    "ModelError",
    "ModelFolder",
    "ModelNotFound",
    "ModelUnsupported",
    "default_home",
    "resolve_model",
]

Progress = Callable[[str], None]
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "LICENSE*", "NOTICE*"]
_HASH_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model on this machine. path: a folder with config.json and *.safetensors."""

    name: str
    path: Path


def default_home() -> Path:
    """Where the store lives: $PRELAY_HOME, or ~/.cache/prelay."""
    return Path(os.environ.get("PRELAY_HOME") or Path.home() / ".cache" / "prelay")


def resolve_model(name: str, home: Path, progress: Progress) -> ModelFolder:
    """The folder of `name`, fetched and converted first if need be.

    name: `smollm2`, a folder with config.json and *.safetensors, a `.gguf` file, or a Hugging Face id.
    progress: called with one sentence before each slow step; not called when nothing is slow.

    Raises ModelNotFound, ModelDownloadFailed, ModelUnsupported.
    """
    if name == SMOLLM2.name:
        return _smollm2(home, progress)
    if not name.strip():
        raise ModelNotFound(f"no model was named; try `{SMOLLM2.name}`")
    path = Path(name).expanduser()
    if path.is_dir():
        return _checked(ModelFolder(path.resolve().name, path.resolve()))
    if path.is_file():
        return _local_file(path.resolve(), home, progress)
    if name.endswith(".gguf") or name.startswith(("/", ".", "~")):
        raise ModelNotFound(f"{name}: no such file or folder")
    return _from_hub(name, progress)


def _smollm2(home: Path, progress: Progress) -> ModelFolder:
    def build(partial: Path) -> None:
        from device.gguf_conversion import convert_gguf

        gguf = fetch_gguf(SMOLLM2, partial, progress)
        progress(f"Converting {SMOLLM2.name} to safetensors, once; about 15 seconds.")
        convert_gguf(gguf, partial)
        gguf.unlink()

    return ModelFolder(SMOLLM2.name, ensure_folder(home / "models", SMOLLM2.name, build))


def _local_file(path: Path, home: Path, progress: Progress) -> ModelFolder:
    if path.suffix != ".gguf":
        raise ModelUnsupported(f"{path}: a model is a folder with safetensors, or a .gguf file")

    def build(partial: Path) -> None:
        from device.gguf_conversion import convert_gguf

        progress(f"Converting {path.name} to safetensors, once.")
        convert_gguf(path, partial)

    folder = ensure_folder(home / "models", f"{path.stem}-{_content_hash(path)}", build)
    return ModelFolder(path.stem, folder)


def _content_hash(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _from_hub(name: str, progress: Progress) -> ModelFolder:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    if not _HUB_ID.match(name):
        raise ModelNotFound(f"{name!r} is neither `{SMOLLM2.name}`, a folder, a .gguf file nor a Hugging Face id")
    with suppress(LocalEntryNotFoundError, ModelUnsupported):
        path = snapshot_download(name, allow_patterns=_HUB_FILES, local_files_only=True)
        return _checked(ModelFolder(name, Path(path)))
    progress(f"Fetching {name} from the Hugging Face hub.")
    try:
        path = snapshot_download(name, allow_patterns=_HUB_FILES)
    except RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"{name}: the Hugging Face hub has no such model, or it needs a token (set HF_TOKEN)"
        ) from error
    except (LocalEntryNotFoundError, ConnectionError) as error:
        raise ModelNotFound(
            f"{name} is not on this machine and the Hugging Face hub cannot be reached; fetch it where there is"
            f" a network with `hf download {name}`, or pass a local folder, or use `{SMOLLM2.name}`"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelDownloadFailed(f"{name}: the download from the Hugging Face hub failed: {error}") from error
    return _checked(ModelFolder(name, Path(path)))


def _checked(folder: ModelFolder) -> ModelFolder:
    path = folder.path
    if not (path / "config.json").is_file():
        raise ModelUnsupported(f"{path}: no config.json, so this is not a model that transformers can load")
    if not any(path.glob("*.safetensors")):
        raise ModelUnsupported(f"{path}: no *.safetensors; convert the weights to safetensors first")
    missing = sorted(name for name in _shards(path) if not (path / name).is_file())
    if missing:
        raise ModelUnsupported(f"{path}: incomplete, {', '.join(missing)} missing; fetch the model again")
    return folder


def _shards(path: Path) -> set[str]:
    """The weight files that a sharded model's index names."""
    index = path / "model.safetensors.index.json"
    return set(json.loads(index.read_bytes())["weight_map"].values()) if index.is_file() else set()
