"""A prefill call to make in several kinds of arrays."""

from typing import Any

import ml_dtypes
import numpy as np

BF16 = ml_dtypes.bfloat16


def prefill_arrays(dtype: Any) -> dict[str, Any]:
    """Arrays of a prefill with 5 tokens; the caches are zero."""
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        name: rng.standard_normal((heads, 128, 64)).astype(dtype)
        for name, heads in (("q", 2), ("k", 1), ("v", 1))
    }
    arrays.update({name: np.zeros((2, 1, 16, 64), dtype) for name in ("k_cache", "v_cache")})
    slots = np.full(128, -1, np.int32)
    slots[:5] = np.arange(3, 8)
    return {**arrays, "slot_mapping": slots}
