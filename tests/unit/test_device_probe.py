"""What is found out by running a model whose layers are written out here."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from device.errors import ModelUnsupported
from device.probe import probe

CPU = torch.device("cpu")


class Model:
    """attention: (layer, kv heads, head dim) of each attention layer. mixers: the recurrent layers by index."""

    def __init__(self, attention: Sequence[tuple[int, int, int]], mixers: Sequence[tuple[int, Any]] = ()) -> None:
        self._attention = attention
        self._mixers = mixers

    def __call__(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool, paged: Any, **others: Any) -> None:
        count = input_ids.shape[1]
        for layer, kv_heads, head_dim in self._attention:
            q, k = torch.ones(1, 4, count, head_dim), torch.ones(1, kv_heads, count, head_dim)
            assert paged.attend(layer, q, k, k, 1.0, None).shape == (1, count, 4, head_dim)
        hidden = torch.arange(1.0, 2 * count + 1).view(1, count, 2)
        for layer, mixer in self._mixers:
            assert others["recurrent"].run(layer, mixer, hidden).shape == hidden.shape


def running_sum(hidden_states: Tensor, cache: Any, states: int = 1, forgetful: bool = False) -> Tensor:
    """The sum of all inputs so far."""
    cache.update_conv_state(hidden_states.transpose(1, 2), 0, conv_kernel_size=3)
    before = cache.get_recurrent_state(0)
    out = hidden_states.cumsum(dim=1) + (0 if before is None or forgetful else before.unsqueeze(1))
    for _ in range(states):
        cache.update_recurrent_state(out[:, -1].double(), 0)
    return out


def keeps_two(hidden_states: Tensor, cache: Any) -> Tensor:
    return running_sum(hidden_states, cache, states=2)


def keeps_none(hidden_states: Tensor, cache: Any) -> Tensor:
    return hidden_states


def forgets(hidden_states: Tensor, cache: Any) -> Tensor:
    return running_sum(hidden_states, cache, forgetful=True)


def test_layers_are_told_apart() -> None:
    model = Model([(3, 2, 8), (1, 2, 8)], [(2, running_sum), (0, running_sum)])
    found = probe(model, CPU, 4, frozenset({0, 2}))
    assert (found.attention_layers, found.kv_heads, found.head_dim) == ((1, 3), 2, 8)
    assert [kept.layer for kept in found.recurrent] == [0, 2]
    kept = found.recurrent[1]
    assert (kept.convolution.name, kept.convolution.shape) == ("convolution.2", (2, 3))
    assert (kept.recurrent.name, kept.recurrent.shape, kept.recurrent.dtype) == ("recurrent.2", (2,), torch.float64)


def test_a_plain_model_gets_no_argument_that_it_does_not_know() -> None:
    def model(input_ids: Tensor, position_ids: Tensor, use_cache: bool, paged: Any) -> None:
        Model([(0, 1, 8)])(input_ids, position_ids, use_cache, paged)

    assert probe(model, CPU, 1, frozenset()).recurrent == ()


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Model([(1, 1, 8)]), r"not each of its layers \[0\] is one recurrent layer"),
        (Model([(1, 1, 8)], [(0, running_sum), (0, running_sum)]), "is one recurrent layer"),
        (Model([(1, 1, 8)], [(0, keeps_two)]), "recurrent layer 0 keeps 1 convolution and 2 recurrent"),
        (Model([(1, 1, 8)], [(0, keeps_none)]), "recurrent layer 0 keeps 0 convolution and 0 recurrent"),
        (Model([(1, 1, 8)], [(0, forgets)]), "recurrent layer 0 does not go on from a given state"),
        (Model([], [(0, running_sum)]), r"layers \[1\] do not attend"),
        (Model([(1, 1, 8), (2, 2, 8)], [(0, running_sum)]), "K and V of different shapes"),
    ],
)
def test_what_does_not_fit_is_named(model: Model, reason: str) -> None:
    with pytest.raises(ModelUnsupported, match=reason):
        probe(model, CPU, 2, frozenset({0}))
