"""What a model's layers ask for, found out by running a few tokens through them."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from device.errors import ModelUnsupported
from device.recurrent import LayerCache, Mixer, RecurrentLayer, convolution_name, recurrent_name
from device.state import SlotTensor

_PIECES = (1, 3, 1, 3)
"""The probe's tokens as a recurrent layer gets them to go on from piece to piece, on the paths for one and for more."""
_LEAST_TOLERANCE = 1e-3
"""Of what rounding may change; not below what TF32 does to fp32."""


@dataclass(frozen=True, slots=True)
class Probed:
    """attention_layers: the indices of the layers that attend, in order; they share kv_heads and head_dim."""

    attention_layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    recurrent: tuple[RecurrentLayer, ...]


@dataclass(frozen=True, slots=True)
class _SeenAttention:
    layer: int
    kv_heads: int
    head_dim: int
    value_dim: int


class _AttentionProbe:
    """An AttentionStep that notes what each layer asks for."""

    def __init__(self) -> None:
        self.seen: list[_SeenAttention] = []

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        self.seen.append(_SeenAttention(layer, key.shape[1], key.shape[-1], value.shape[-1]))
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2)


class _RecurrentProbe:
    """A RecurrentRun that notes what each layer keeps, and checks that it goes on from it."""

    def __init__(self) -> None:
        self.seen: list[RecurrentLayer] = []

    def run(self, layer: int, mixer: Mixer, hidden: Tensor) -> Tensor:
        cache = _EmptyCache()
        whole = mixer(hidden_states=hidden, cache=cache)
        kept = cache.kept(layer)
        _check_continues(kept, mixer, hidden, whole)
        self.seen.append(kept)
        return whole


@dataclass(slots=True)
class _EmptyCache:
    """The cache of a sequence's first call, see LayerCache: there is no state yet, and its shapes are not known."""

    convolution: list[tuple[tuple[int, ...], torch.dtype]] = field(default_factory=list)
    recurrent: list[tuple[tuple[int, ...], torch.dtype]] = field(default_factory=list)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        kernel = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        self.convolution.append(((*conv_states.shape[1:-1], kernel), conv_states.dtype))
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self.recurrent.append((tuple(recurrent_states.shape[1:]), recurrent_states.dtype))
        return recurrent_states

    def kept(self, layer: int) -> RecurrentLayer:
        if (len(self.convolution), len(self.recurrent)) != (1, 1):
            raise ModelUnsupported(
                f"recurrent layer {layer} keeps {len(self.convolution)} convolution and {len(self.recurrent)} recurrent"
                " states in transformers' cache; we run layers that keep one of each"
            )
        return RecurrentLayer(
            layer,
            SlotTensor(convolution_name(layer), *self.convolution[0]),
            SlotTensor(recurrent_name(layer), *self.recurrent[0]),
        )


def _check_continues(kept: RecurrentLayer, mixer: Mixer, hidden: Tensor, whole: Tensor) -> None:
    """Raise ModelUnsupported unless pieces, each from the states after the one before, give what the whole gives.

    No tolerance fits all dtypes, so a difference counts only if leaving out a state would make about as much of one. A
    state that hardly matters after a few tokens is not missed here.
    """
    shapes = (kept.convolution, kept.recurrent)
    convolution, recurrent = (torch.zeros((1, *t.shape), dtype=t.dtype, device=hidden.device) for t in shapes)
    tolerance = max(_LEAST_TOLERANCE, 8 * torch.finfo(whole.dtype).eps) * float(whole.abs().max())
    first = 0
    for count in _PIECES:
        part, wanted = (rows[:, first : first + count] for rows in (hidden, whole))
        first += count
        unaided = min(
            _error(mixer, part, wanted, LayerCache(torch.zeros_like(convolution), recurrent.clone())),
            _error(mixer, part, wanted, LayerCache(convolution.clone(), torch.zeros_like(recurrent))),
        )
        error = _error(mixer, part, wanted, LayerCache(convolution, recurrent))
        if not error <= max(unaided / 4, tolerance):
            raise ModelUnsupported(
                f"recurrent layer {kept.layer} does not go on from a given state: its prompts cannot be cut"
            )


def _error(mixer: Mixer, hidden: Tensor, wanted: Tensor, cache: LayerCache) -> float:
    return float((mixer(hidden_states=hidden, cache=cache) - wanted).abs().max())


@torch.inference_mode()
def probe(module: Any, device: torch.device, layers: int, recurrent: frozenset[int]) -> Probed:
    """Run a few tokens through a model of `layers` layers, those of `recurrent` routed (see `route_mixer`).

    Raises ModelUnsupported unless all other layers are attention of one and the same shape.
    """
    kind, attention, states = type(module).__name__, _AttentionProbe(), _RecurrentProbe()
    positions = torch.arange(sum(_PIECES), device=device).unsqueeze(0)
    try:
        routed = {"recurrent": states} if recurrent else {}
        # Id 0 may be padding, whose embedding is zero.
        module(input_ids=positions + 1, position_ids=positions, use_cache=False, paged=attention, **routed)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise ModelUnsupported(f"{kind} cannot be called with our attention: {error}") from error
    _check_layers(kind, layers, recurrent, attention, states)
    first = attention.seen[0]
    return Probed(
        attention_layers=tuple(sorted({seen.layer for seen in attention.seen})),
        kv_heads=first.kv_heads,
        head_dim=first.head_dim,
        recurrent=tuple(sorted(states.seen, key=lambda kept: kept.layer)),
    )


def _check_layers(
    kind: str, layers: int, recurrent: frozenset[int], attention: _AttentionProbe, states: _RecurrentProbe
) -> None:
    if sorted(kept.layer for kept in states.seen) != sorted(recurrent):
        raise ModelUnsupported(f"{kind}: not each of its layers {sorted(recurrent)} is one recurrent layer")
    missing = sorted(set(range(layers)) - recurrent - {seen.layer for seen in attention.seen})
    if missing:
        raise ModelUnsupported(f"{kind}: layers {missing} do not attend through transformers' attention interface")
    shapes = {(seen.kv_heads, seen.head_dim, seen.value_dim) for seen in attention.seen}
    first = attention.seen[0]
    if len(shapes) > 1 or first.head_dim != first.value_dim:
        raise ModelUnsupported(f"{kind}: its layers cache K and V of different shapes: {sorted(shapes)}")
