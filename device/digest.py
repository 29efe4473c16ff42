"""A fingerprint of a model folder that two nodes can compare in a moment."""

import json
from pathlib import Path

import xxhash

SAMPLES = 64
SAMPLE_BYTES = 4096


def model_digest(folder: Path) -> str:
    """xxh3 (32 hex digits) over the configuration, and each weight file's size, header and evenly spread samples.

    Not a full read: it tells different models and fine-tunes apart, and is no protection against forgery.
    """
    digest = xxhash.xxh3_128()
    digest.update(_configuration(folder))
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.name.encode())
        _add_weights(digest, path)
    return digest.hexdigest()


def _configuration(folder: Path) -> bytes:
    """The configuration without what depends on how the folder was written."""
    config = json.loads((folder / "config.json").read_bytes())
    for key in ("transformers_version", "_name_or_path"):
        config.pop(key, None)
    return json.dumps(config, sort_keys=True).encode()


def _add_weights(digest: xxhash.xxh3_128, path: Path) -> None:
    size = path.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        digest.update(file.read(min(header_size, size)))
        for sample in range(SAMPLES):
            file.seek(sample * size // SAMPLES)
            digest.update(file.read(SAMPLE_BYTES))
