"""LoRA adapters in peft format, with random weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

SHAPES = {"q_proj": (16, 16), "k_proj": (16, 8), "v_proj": (16, 8), "o_proj": (16, 16)}
"""Inputs and outputs of the attention's linear layers in the model of `tiny_model`."""


def tensors_of(linears: Mapping[str, tuple[int, int]], rank: int, seed: int, size: float = 0.5) -> dict[str, Tensor]:
    """A [rank, inputs] and B [outputs, rank] of each layer, by the names that peft gives them."""
    noise = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (inputs, outputs) in linears.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = size * torch.randn(rank, inputs, generator=noise)
        tensors[f"base_model.model.{name}.lora_B.weight"] = size * torch.randn(outputs, rank, generator=noise)
    return tensors


def save_adapter(folder: Path, tensors: Mapping[str, Tensor], **fields: Any) -> Path:
    """fields: of the configuration; rank 2, alpha 4 and q_proj and v_proj as targets when nothing else is said."""
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config | fields))
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    return folder


def save_tiny_adapter(folder: Path, seed: int, size: float = 0.5) -> Path:
    """An adapter for the model of `tiny_model`: q_proj and v_proj of both layers, rank 2."""
    linears = {f"model.layers.{i}.self_attn.{m}": SHAPES[m] for i in (0, 1) for m in ("q_proj", "v_proj")}
    return save_adapter(folder, tensors_of(linears, 2, seed, size))
