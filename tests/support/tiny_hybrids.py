"""Random models with attention and recurrent layers, and routers over them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tiny_model import build_tiny
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from device.router import SyncRouter

VOCABULARY = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # wide, so that greedy choices are not near ties
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}


LAYER_TYPES = [*["linear_attention"] * 2, "full_attention", "linear_attention", "full_attention"]
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 6,
    "mamba_chunk_size": 4,
}
DELTA_NET: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}


def bamba() -> Any:
    """Mamba-2 with several heads and groups in layers 0, 2 and 4, attention in layers 1 and 3."""
    return BambaForCausalLM(BambaConfig(**SIZES, **MAMBA, attn_layer_indices=[1, 3]))


def granite() -> Any:
    """Mamba-2 and experts."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16}
    config = GraniteMoeHybridConfig(**SIZES, **MAMBA, **experts, layer_types=LAYER_TYPES, logits_scaling=3.0)
    return GraniteMoeHybridForCausalLM(config)


def qwen3_next() -> Any:
    """Gated delta nets with grouped heads, and experts."""
    config = Qwen3NextConfig(
        **SIZES, **DELTA_NET, **EXPERTS, num_experts=4, shared_expert_intermediate_size=16, head_dim=8,
        layer_types=LAYER_TYPES,
    )  # fmt: skip
    return Qwen3NextForCausalLM(config)


def qwen3_5() -> Any:
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES, **DELTA_NET, head_dim=8, layer_types=LAYER_TYPES))


def olmo() -> Any:
    """Gated delta nets whose states may have negative eigenvalues."""
    delta_net = DELTA_NET | {"linear_num_key_heads": 4}
    return OlmoHybridForCausalLM(OlmoHybridConfig(**SIZES, **delta_net, layer_types=LAYER_TYPES))


HYBRIDS: dict[str, Callable[[], Any]] = {
    "bamba": bamba,
    "granite": granite,
    "qwen3-next": qwen3_next,
    "qwen3.5": qwen3_5,
    "olmo": olmo,
}


def make_hybrid(name: str) -> Any:
    """A model that forgets slowly: as transformers makes them, little of a state outlives a few tokens."""
    torch.manual_seed(11)
    model = HYBRIDS[name]().float()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("A_log"):
                parameter.uniform_(0.02, 0.5).log_()
            elif parameter_name.endswith("dt_bias"):
                parameter.uniform_(-1.0, 1.0)
    return model


def save_hybrid(name: str, folder: Path) -> None:
    make_hybrid(name).save_pretrained(folder)


def build_hybrid(folder: Path, **changes: Any) -> SyncRouter:
    """A router over the model in `folder`: on a CPU, fp32, 40 blocks of 4 tokens, 6 slots and 3 snapshots."""
    return build_tiny(folder, **({"total_blocks": 40, "slots": 6, "snapshots": 3} | changes))
