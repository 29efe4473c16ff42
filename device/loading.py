"""From a model folder to a model on a device, with our attention in it, or a sentence that says why not."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM

from device.attention import HOOK
from device.cpu_linear import can_pack, pack_linears
from device.digest import model_digest
from device.errors import DeviceSetupError, ModelUnsupported
from device.quiet import no_progress_bars

DTYPES = {"auto": torch.bfloat16, "bf16": torch.bfloat16, "fp32": torch.float32}
_LAYERS_WE_RUN = {"full_attention", "sliding_attention"}
_ROPE_BY_LENGTH = {"dynamic", "longrope"}
"""Their angles depend on the longest sequence of a batch, so a sequence would depend on its neighbours."""
_PROBE_TOKENS = 2


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run. module: a transformers causal LM in eval mode, without gradients."""

    module: Any
    digest: str
    device: torch.device
    dtype: torch.dtype
    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int


@dataclass(frozen=True, slots=True)
class _SeenLayer:
    layer: int
    kv_heads: int
    head_dim: int
    value_dim: int


class _Probe:
    """An AttentionStep that notes what each layer asks for."""

    def __init__(self) -> None:
        self.seen: list[_SeenLayer] = []

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        self.seen.append(_SeenLayer(layer, key.shape[1], key.shape[-1], value.shape[-1]))
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2)


def load_model(folder: Path, device: str, dtype: str) -> LoadedModel:
    """Load the causal LM in `folder`.

    device: "cpu", "cuda", "cuda:0", ...; dtype: "auto" (bf16), "bf16", "fp32".
    Raises ModelUnsupported, DeviceSetupError.
    """
    target, torch_dtype = parse_device(device), parse_dtype(dtype)
    config = _read_config(folder)
    _refuse(config)
    module = _move(_load(folder, torch_dtype), target).eval().requires_grad_(False)
    if can_pack(target, torch_dtype):
        pack_linears(module)
    text = config.get_text_config()
    layers = _probe(module, target, text.num_hidden_layers)
    return LoadedModel(
        module=module,
        digest=model_digest(folder),
        device=target,
        dtype=torch_dtype,
        layers=text.num_hidden_layers,
        kv_heads=layers.kv_heads,
        head_dim=layers.head_dim,
        vocab_size=text.vocab_size,
        max_positions=_positions(text),
    )


def parse_device(name: str) -> torch.device:
    """Raises DeviceSetupError when torch has no such device here."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise DeviceSetupError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device


def parse_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise DeviceSetupError(f"no dtype {name!r}; choose one of: {', '.join(DTYPES)}")
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """As settings name it."""
    return next(name for name, known in DTYPES.items() if name != "auto" and known == dtype)


def _read_config(folder: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        raise ModelUnsupported(
            f"{folder}: transformers {transformers.__version__} cannot read its config.json: {error}"
        ) from error


def _refuse(config: Any) -> None:
    """Raise ModelUnsupported for what the configuration alone gives away."""
    text = config.get_text_config()
    reasons = []
    if getattr(config, "is_encoder_decoder", False):
        reasons.append("an encoder-decoder")
    if getattr(text, "kv_lora_rank", None):
        reasons.append("multi-head latent attention")
    others = sorted(set(getattr(text, "layer_types", None) or ()) - _LAYERS_WE_RUN)
    if others:
        reasons.append(f"layers of type {', '.join(others)}")
    rope = sorted(_rope_types(getattr(text, "rope_parameters", None)) & _ROPE_BY_LENGTH)
    if rope:
        reasons.append(f"rotary embeddings of type {', '.join(rope)}")
    if reasons:
        raise ModelUnsupported(f"{config.model_type} has {' and '.join(reasons)}, which we do not run yet")


def _positions(text: Any) -> int:
    positions = getattr(text, "max_position_embeddings", None)
    if not isinstance(positions, int):
        raise ModelUnsupported(f"{text.model_type}: its configuration has no max_position_embeddings")
    return positions


def _rope_types(parameters: Any) -> set[str]:
    """The rope types in a configuration's rope parameters, which may be nested by layer type."""
    if not isinstance(parameters, dict):
        return set()
    own = {parameters["rope_type"]} if isinstance(parameters.get("rope_type"), str) else set()
    return own.union(*(_rope_types(value) for value in parameters.values()))


def _load(folder: Path, dtype: torch.dtype) -> Any:
    no_progress_bars()
    try:
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=HOOK, local_files_only=True
        )
    except (ValueError, OSError, KeyError, AttributeError, ImportError) as error:
        raise ModelUnsupported(f"{folder}: transformers cannot load it: {error}") from error


def _move(module: Any, device: torch.device) -> Any:
    try:
        return module.to(device)
    except torch.OutOfMemoryError as error:
        raise DeviceSetupError(f"the weights do not fit on {device}; free its memory or take another") from error


@torch.inference_mode()
def _probe(module: Any, device: torch.device, layers: int) -> _SeenLayer:
    """Run two tokens through the model and check that every layer is attention of one and the same shape."""
    kind, probe = type(module).__name__, _Probe()
    ids = torch.arange(_PROBE_TOKENS, device=device).unsqueeze(0)
    try:
        module(input_ids=ids, position_ids=ids, use_cache=False, paged=probe)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise ModelUnsupported(f"{kind} cannot be called with our attention: {error}") from error
    missing = sorted(set(range(layers)) - {seen.layer for seen in probe.seen})
    if missing:
        raise ModelUnsupported(f"{kind}: layers {missing} do not attend through transformers' attention interface")
    shapes = {(seen.kv_heads, seen.head_dim, seen.value_dim) for seen in probe.seen}
    first = probe.seen[0]
    if len(shapes) > 1 or first.head_dim != first.value_dim:
        raise ModelUnsupported(f"{kind}: its layers cache K and V of different shapes: {sorted(shapes)}")
    return first
