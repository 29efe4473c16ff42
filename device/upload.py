"""Small arrays from the host to a device, many in one copy."""

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor


def upload(device: torch.device, *lists: ArrayLike, dtype: Any = np.int64) -> tuple[Tensor, ...]:
    """One tensor [n] for each list, of `dtype`, a type of numpy. On CUDA the host waits for nothing."""
    arrays = [np.asarray(values, dtype=dtype) for values in lists]
    packed = torch.from_numpy(np.concatenate(arrays))
    if device.type == "cuda":
        # A copy from pageable memory would wait for all that was launched before it.
        packed = packed.pin_memory().to(device, non_blocking=True)
    parts: tuple[Tensor, ...] = torch.split(packed, [len(array) for array in arrays])
    return parts
