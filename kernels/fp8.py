"""fp8 caches that were written elsewhere.

trn2's fp8 (float8_e4m3) ends at 240, where float8_e4m3fn ends at 448: the same bits mean infinity
or NaN on the device from 248 on. What `write_kv_cache` and `padded_prefill` store is held within
240. A cache of another writer is halved here, once, and its scale doubled; no kernel looks at the
values of a cache, as that would cost a pass over it on each call.
"""

from typing import Any

import ml_dtypes
import numpy as np

from ..reference.attention import FP8_MAX
from .arrays import array_kind

FN = np.dtype(ml_dtypes.float8_e4m3fn)
_VALUES = np.arange(256, dtype=np.uint8).view(FN).astype(np.float32)
_HALVED = (_VALUES / 2).astype(FN).view(np.uint8)


def fp8_for_device(cache: Any) -> tuple[Any, float]:
    """A float8_e4m3fn cache with values up to 448 as (cache, factor) that the kernels can read.

    The factor belongs to k_scale or v_scale. A cache within 240 comes back as it is, with 1.0;
    another one as a new array of halved values with 2.0: exact down to 2^-5, rounded to a multiple
    of 2^-9 below. NaN stays NaN. ValueError for another dtype.
    """
    kind = array_kind(cache=cache)
    values = kind.read(cache)
    if values.dtype != FN:
        raise ValueError(f"cache: dtype {values.dtype} must be {FN}")
    bits = values.view(np.uint8)
    if not (np.abs(_VALUES) > FP8_MAX)[bits].any():
        return cache, 1.0
    return kind.give(_HALVED[bits].view(FN)), 2.0
