"""A registered pool as an array of whatever memory it is in."""

from typing import Any

import numpy as np


def as_array(pool: Any) -> tuple[Any, Any]:
    """(array module, flat uint8 array that shares the pool's memory): numpy, or CuPy for a pool on a GPU."""
    if hasattr(pool, "__cuda_array_interface__"):
        import cupy  # only where the pool is on a GPU

        return cupy, cupy.asarray(pool)
    return np, np.asarray(pool)


def wait_for_copies(xp: Any) -> None:
    """Until what was copied is there for everybody who looks."""
    if xp is not np:
        xp.cuda.get_current_stream().synchronize()
