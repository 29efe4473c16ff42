"""A router from its configuration."""

from pathlib import Path

import structlog
import torch

from device.async_router import AsyncRouter
from device.errors import DeviceSetupError
from device.router import SyncRouter, build_sync_router
from scheduler.device_config import DeviceConfig

ROUTERS = ("sync", "async")
_log = structlog.get_logger()


def build_router(config: DeviceConfig) -> SyncRouter | AsyncRouter:
    """Load the model and allocate its KV pool. Raises ModelUnsupported, DeviceSetupError."""
    if config.router not in ROUTERS:
        raise DeviceSetupError(f"no router {config.router!r}; choose one of: {', '.join(ROUTERS)}")
    torch.set_num_threads(config.threads)
    router = build_sync_router(
        folder=Path(config.model_path),
        name=config.model_name,
        device=_device_name(config.device),
        dtype=config.dtype,
        attention=config.attention,
        block_size=config.block_size,
        kv_bytes=config.kv_bytes,
        total_blocks=None,
        max_model_len=config.max_model_len,
        spill_bytes=config.spill_bytes,
        spill_path=None if config.spill_path is None else Path(config.spill_path).expanduser(),
        slots=config.slots,
        snapshots=config.snapshots,
        staging_bytes=config.staging_bytes,
    )
    return _asynchronous(router) if config.router == "async" else router


def _asynchronous(router: SyncRouter) -> SyncRouter | AsyncRouter:
    """Slower is better than not at all: page-locked memory may be scarce."""
    try:
        return AsyncRouter(router)
    except RuntimeError as error:
        _log.warning("no asynchronous router, steps run one at a time", reason=str(error))
        return router


def _device_name(name: str) -> str:
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"
