"""A router from its configuration."""

from pathlib import Path

import torch

from device.router import SyncRouter, build_sync_router
from scheduler.device_config import DeviceConfig


def build_router(config: DeviceConfig) -> SyncRouter:
    """Load the model and allocate its KV pool. Raises ModelUnsupported or ValueError for a name that is unknown."""
    torch.set_num_threads(config.threads)
    return build_sync_router(
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
    )


def _device_name(name: str) -> str:
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"
