"""From a model folder to a model on a device, with our attention in it, or a sentence that says why not."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from device.attention import HOOK
from device.cpu_linear import can_pack, pack_linears
from device.digest import model_digest
from device.errors import DeviceSetupError, ModelUnsupported
from device.probe import probe
from device.quiet import no_progress_bars
from device.recurrent import RecurrentLayer, route_mixer

DTYPES = {"auto": torch.bfloat16, "bf16": torch.bfloat16, "fp32": torch.float32}
_RECURRENT = "linear_attention"
"""What transformers calls the layers whose state does not grow with the sequence."""
_LAYERS_WE_RUN = {"full_attention", "sliding_attention", _RECURRENT}
_ROPE_BY_LENGTH = {"dynamic", "longrope"}
"""Their angles depend on the longest sequence of a batch, so a sequence would depend on its neighbours."""
_NO_LIMIT = (0.0, float("inf"))
"""Of Mamba-2's time steps. Another one is kept by transformers in chunks but not in single tokens, so where a prompt is
cut would change the answer."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run. module: a transformers causal LM in eval mode, without gradients.

    layers: those that have KV; attention_layers: their indices in the model, in the order of the KV pool's layers.
    recurrent: the other layers and what they keep per sequence; empty for a plain transformer.
    """

    module: Any
    digest: str
    device: torch.device
    dtype: torch.dtype
    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    attention_layers: tuple[int, ...]
    recurrent: tuple[RecurrentLayer, ...]


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
    recurrent = _recurrent_layers(text)
    _route_recurrent(module, recurrent)
    probed = probe(module, target, text.num_hidden_layers, recurrent)
    return LoadedModel(
        module=module,
        digest=model_digest(folder),
        device=target,
        dtype=torch_dtype,
        layers=len(probed.attention_layers),
        kv_heads=probed.kv_heads,
        head_dim=probed.head_dim,
        vocab_size=text.vocab_size,
        max_positions=_positions(text),
        attention_layers=probed.attention_layers,
        recurrent=probed.recurrent,
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
    types = set(getattr(text, "layer_types", None) or ())
    if others := sorted(types - _LAYERS_WE_RUN):
        reasons.append(f"layers of type {', '.join(others)}")
    if types == {_RECURRENT}:
        reasons.append("no attention layers")
    if tuple(getattr(text, "time_step_limit", None) or _NO_LIMIT) != _NO_LIMIT:
        reasons.append("a limit on time steps")
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


def _recurrent_layers(text: Any) -> frozenset[int]:
    types = getattr(text, "layer_types", None) or ()
    return frozenset(index for index, kind in enumerate(types) if kind == _RECURRENT)


def _route_recurrent(module: Any, layers: frozenset[int]) -> None:
    """Recurrent layers are known by their convolution: the decoder layer around them may have their index too."""
    for part in module.modules():
        if getattr(part, "layer_idx", None) in layers and hasattr(part, "conv1d"):
            route_mixer(part)


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
