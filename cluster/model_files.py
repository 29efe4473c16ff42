"""What a model folder says outside its weights."""

import json
from pathlib import Path
from typing import Any


def eos_token_ids(folder: Path) -> frozenset[int]:
    """The ids that end an answer: from generation_config.json, else config.json."""
    for name in ("generation_config.json", "config.json"):
        value = _read(folder / name).get("eos_token_id")
        if isinstance(value, int):
            return frozenset({value})
        if isinstance(value, list):
            return frozenset(int(v) for v in value)
    return frozenset()


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    values: dict[str, Any] = json.loads(path.read_text())
    return values
