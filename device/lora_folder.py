"""A LoRA adapter from a folder in peft format, checked against the model that it is for."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from device.lora_config import LoraConfig, read_config
from scheduler.adapters import AdapterFacts, AdapterRefused

WEIGHTS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"
_DTYPES = ("F32", "F16", "BF16")
_SHOWN = 3
"""How many tensors a refusal names."""


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A linear layer of the model, and where its adapter's weights must be."""

    inputs: int
    outputs: int
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class LoraLayer:
    """What is added to one linear layer's output: scaling * (x down^T) up.

    down: [rank, inputs], peft's lora_A; up: [rank, outputs], peft's lora_B transposed, which a CPU multiplies faster.
    """

    down: Tensor
    up: Tensor
    scaling: float


@dataclass(frozen=True, slots=True)
class Adapter:
    """layers: by the qualified name of the linear layer."""

    facts: AdapterFacts
    layers: Mapping[str, LoraLayer]


def read_adapter(
    name: str, folder: Path, linears: Mapping[str, LinearShape], head: str | None, max_rank: int
) -> Adapter:
    """Read the adapter in `folder`, its weights onto the device and in the dtype of the layers that it changes.

    linears: all linear layers of the model, by qualified name; head: the name of the output layer, which a pattern
    for all layers leaves out. Raises AdapterRefused, torch.OutOfMemoryError.
    """
    config = read_config(folder, max_rank)
    targets = config.targets(linears, head)
    digest, layers = xxhash.xxh3_128(), {}
    with _weights_of(folder) as weights:
        _check_tensors(weights, {key: shape for t in targets for key, shape in _tensors(t, config, linears[t]).items()})
        for target in sorted(targets):
            scaling = config.scaling(target)
            digest.update(f"{target} {scaling!r} ".encode())
            down, up = (
                _read(weights, key, linears[target], digest) for key in _tensors(target, config, linears[target])
            )
            layers[target] = LoraLayer(down, up.T.contiguous(), scaling)
    rank = max(layer.down.shape[0] for layer in layers.values())
    modules = tuple(sorted({target.rpartition(".")[2] for target in targets}))
    return Adapter(AdapterFacts(name, digest.hexdigest(), rank, modules), layers)


@contextmanager
def _weights_of(folder: Path) -> Iterator[Any]:
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        pickled = (folder / PICKLE_FILE).exists()
        why = f"{PICKLE_FILE} is a pickle, which may run code, and is not read; " if pickled else ""
        raise AdapterRefused(f"no {WEIGHTS_FILE} in {folder}; {why}save the adapter with safe_serialization=True")
    try:
        with safe_open(path, framework="pt") as weights:
            yield weights
    except (SafetensorError, OSError) as error:
        raise AdapterRefused(f"{path} is damaged or cannot be read ({error}); copy it again") from error


def _tensors(target: str, config: LoraConfig, linear: LinearShape) -> dict[str, tuple[int, int]]:
    """Names and shapes of A and B for one layer, in this order, as peft saves them."""
    rank, prefix = config.rank(target), f"base_model.model.{target}"
    return {
        f"{prefix}.lora_A.weight": (rank, linear.inputs),
        f"{prefix}.lora_B.weight": (linear.outputs, rank),
    }


def _check_tensors(weights: Any, wanted: Mapping[str, tuple[int, int]]) -> None:
    """Everything that the file's header tells, before a tensor is read."""
    present = set(weights.keys())
    if missing := sorted(wanted.keys() - present):
        raise AdapterRefused(f"{WEIGHTS_FILE} lacks {_some(missing)}, which target_modules asks for; save it again")
    if left := sorted(present - wanted.keys()):
        raise AdapterRefused(
            f"{WEIGHTS_FILE} has {_some(left)}, which belongs to no linear layer in target_modules; "
            "save the adapter alone (save_embedding_layers=False), or serve the merged model"
        )
    for key, shape in wanted.items():
        header = weights.get_slice(key)
        if tuple(header.get_shape()) != shape:
            raise AdapterRefused(
                f"{key} is {header.get_shape()}, but r and this model's layer ask for {list(shape)}; "
                "load an adapter that was trained for this model"
            )
        if header.get_dtype() not in _DTYPES:
            raise AdapterRefused(f"{key} is {header.get_dtype()}; save it as one of {', '.join(_DTYPES)}")


def _read(weights: Any, key: str, linear: LinearShape, digest: xxhash.xxh3_128) -> Tensor:
    # A copy: the tensor lies in the mapped file, whose content may change.
    tensor: Tensor = weights.get_tensor(key).clone(memory_format=torch.contiguous_format)
    digest.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    digest.update(tensor.view(torch.uint8).numpy().data)
    placed = tensor.to(linear.device, linear.dtype)
    if not placed.isfinite().all():
        raise AdapterRefused(f"{key} has values that are not finite in {linear.dtype}; its training went wrong")
    return placed


def _some(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
