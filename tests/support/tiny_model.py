"""A random Llama of two layers, and routers over it."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from device.router import SyncRouter, build_sync_router

CONFIG: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.4,
}


def save_tiny_model(folder: Path) -> None:
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**CONFIG)).save_pretrained(folder)


def build_tiny(folder: Path, **changes: Any) -> SyncRouter:
    """A router over the model in `folder`: on a CPU, fp32, 12 blocks of 4 tokens."""
    options: dict[str, Any] = {
        "name": "tiny",
        "device": "cpu",
        "dtype": "fp32",
        "attention": "torch",
        "block_size": 4,
        "kv_bytes": None,
        "total_blocks": 12,
        "max_model_len": None,
    }
    return build_sync_router(folder, **(options | changes))
