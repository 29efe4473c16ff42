"""All routers over the tiny model, by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny_model import build_tiny

from device.async_router import AsyncRouter
from device.recorded_router import RecordingRouter
from device.scripted_router import Script, ScriptedRouter
from scheduler.contract import DeviceIo

ROUTERS: dict[str, Callable[..., DeviceIo]] = {
    "sync": build_tiny,
    "async": lambda folder, **changes: AsyncRouter(build_tiny(folder, **changes)),
    "scripted": lambda folder, **changes: ScriptedRouter(build_tiny(folder, **changes), Script()),
    "newest first": lambda folder, **changes: ScriptedRouter(
        AsyncRouter(build_tiny(folder, **changes)), Script(newest_first=True)
    ),
    "recorded": lambda folder, **changes: RecordingRouter(AsyncRouter(build_tiny(folder, **changes))),
}
DEPTH_ONE = [name for name in ROUTERS if name in ("sync", "scripted")]
DEPTH_TWO = [name for name in ROUTERS if name not in DEPTH_ONE]


def build(name: str, folder: Path, **changes: Any) -> DeviceIo:
    """changes: to the settings of `build_tiny`; there are slots and a spill store."""
    return ROUTERS[name](folder, **{"slots": 8, "spill_bytes": 1 << 20, **changes})
