"""Linear layers for bf16 on a CPU, with weights laid out once for oneDNN instead of in every call.

Worth about half of the time of a decode step, where each call otherwise spends more on the layout than on the product.
"""

from typing import Any

import torch
from torch import Tensor, nn

_ROWS_EXPECTED = 8
"""The layout is chosen for decode; products of hundreds of rows run as fast with it."""


class PackedLinear(nn.Module):
    """What `nn.Linear` computes. The weight lives on only in its packed form."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight, _ROWS_EXPECTED)
        self._bias = linear.bias

    def forward(self, rows: Tensor) -> Tensor:
        if rows.numel() == 0:
            return rows.new_empty((*rows.shape[:-1], self.out_features))
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return out


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this is a CPU whose oneDNN multiplies bf16."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return False
    return hasattr(torch.ops.mkldnn, "_linear_pointwise") and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@torch.no_grad()
def pack_linears(module: Any) -> None:
    """Replace every plain `nn.Linear` inside `module`, in place."""
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear:
            setattr(module, name, PackedLinear(child))
        else:
            pack_linears(child)
