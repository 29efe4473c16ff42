"""Attention back ends by name, and the hook through which a transformers model reaches the one in use.

The model is called with `paged=<AttentionStep>`; transformers hands unknown arguments down to the attention
function of every layer, so no layer is rewritten and no state is global. Our name has no mask function registered
with transformers, which is its way of saying that no mask is to be made.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor
from transformers import AttentionInterface

from device.batch import Batch
from device.errors import DeviceSetupError, ModelUnsupported
from device.kv_pool import KvPool

HOOK = "prelay_paged"
"""The name of our attention among those of transformers."""

_WITHOUT_EFFECT = {
    "dropout",
    "position_ids",
    "use_cache",
    "output_attentions",
    "is_causal",
    "cache_position",
    "recurrent",  # for the recurrent layers beside us
}


class AttentionStep(Protocol):
    """Attention for the tokens of one step."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """Store this step's K and V in the pool and attend over each sequence's whole context.

        query: [1, heads, tokens, head_dim]; key, value: [1, kv_heads, tokens, head_dim].
        window: a token sees itself and the window - 1 positions before it; None: all of them.
        Returns [1, tokens, heads, head_dim].
        """
        ...


class NumberedLayers:
    """An AttentionStep for a model of which only some layers attend. layers: their indices, in the pool's order."""

    def __init__(self, step: AttentionStep, layers: Sequence[int]) -> None:
        self._step = step
        self._numbers = {layer: number for number, layer in enumerate(layers)}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        return self._step.attend(self._numbers[layer], query, key, value, scaling, window)


class AttentionBackend(Protocol):
    """A way to compute paged attention."""

    def plan(self, pool: KvPool, batch: Batch) -> AttentionStep:
        """What is the same for all layers of a step is worked out here, once."""
        ...


_BACKENDS: dict[str, Callable[[], AttentionBackend]] = {}


def register_backend(name: str, factory: Callable[[], AttentionBackend]) -> None:
    _BACKENDS[name] = factory


def attention_backend(name: str) -> AttentionBackend:
    """The back end of that name. Raises DeviceSetupError."""
    if name not in _BACKENDS:
        raise DeviceSetupError(f"no attention back end {name!r}; choose one of: {', '.join(sorted(_BACKENDS))}")
    return _BACKENDS[name]()


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    paged: AttentionStep | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in each layer. Raises ModelUnsupported."""
    unknown = [name for name, given in others.items() if name not in _WITHOUT_EFFECT and not _is_off(given)]
    if unknown:
        raise ModelUnsupported(f"attention in {type(module).__name__} needs {', '.join(unknown)}, which we lack")
    if paged is None or attention_mask is not None or not getattr(module, "is_causal", True):
        raise ModelUnsupported(f"{type(module).__name__} is not plain causal attention over a paged cache")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return paged.attend(module.layer_idx, query, key, value, scale, sliding_window), None


def _is_off(given: Any) -> bool:
    return given is None or given is False


AttentionInterface.register(HOOK, paged_attention)
