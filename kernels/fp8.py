"""fp8 caches that were written elsewhere.

trn2's fp8 (float8_e4m3) ends at 240, where float8_e4m3fn ends at 448: the same bits mean infinity
or NaN on the device from 248 on. What `write_kv_cache` and `padded_prefill` store is held within
240. A cache of another writer is halved here, once, and its scale doubled. The host functions
refuse tokens that hold more, as no kernel could tell.
"""

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from ..reference.kv_cache import FP8_MAX
from ..reference.paging import UNUSED_BLOCK
from .arrays import Array, array_kind

E4M3FN = np.dtype(ml_dtypes.float8_e4m3fn)
_VALUES = np.arange(256, dtype=np.uint8).view(E4M3FN).astype(np.float32)
_HALVED = (_VALUES / 2).astype(E4M3FN).view(np.uint8)


DEVICE_NAN = 0x7C
"""What trn2 stores for NaN; float8_e4m3fn reads it as 384."""
_TOO_LARGE = (np.abs(_VALUES) > FP8_MAX) & (np.arange(256) & 0x7F != DEVICE_NAN)


def check_e4m3fn(
    name: str,
    cache: Array,
    tables: Array,
    tokens: Sequence[tuple[int, int]],
    *,
    k_pre_transposed: bool = False,
) -> None:
    """ValueError naming the value where a float8_e4m3fn cache is not what the device reads.

    cache [pages, KV, page_size, d], or [pages, KV, d, page_size] with k_pre_transposed; tables
    [B, W] int32, -1 absent; tokens: the first one that counts of each request, and the one after
    the last. 384 has the bits of the device's own NaN and passes.
    """
    rows = cache.view(np.uint8)
    rows = rows.swapaxes(2, 3) if k_pre_transposed else rows
    page_size = rows.shape[2]
    for table, (first, end) in zip(tables, tokens, strict=True):
        begin = first // page_size
        pages = table[begin : -(-end // page_size)]
        positions = np.arange(len(pages) * page_size).reshape(-1, page_size) + begin * page_size
        counts = (positions >= first) & (positions < end) & (pages != UNUSED_BLOCK)[:, None]
        found = rows[pages].swapaxes(1, 2)[counts]
        wrong = found[_TOO_LARGE[found]]
        if wrong.size:
            raise ValueError(
                f"{name}: holds {_VALUES[wrong[0]]:g} in float8_e4m3fn, must be within "
                f"+-{FP8_MAX:g} as trn2's float8_e4m3: convert it once with fp8_for_device"
            )


def fp8_for_device(cache: Any) -> tuple[Any, float]:
    """A float8_e4m3fn cache with values up to 448 as (cache, factor) that the kernels can read.

    The factor belongs to k_scale or v_scale. A cache within 240 comes back as it is, with 1.0;
    another one as a new array of halved values with 2.0: exact down to 2^-5, rounded to a multiple
    of 2^-9 below. NaN stays NaN. ValueError for another dtype.
    """
    kind = array_kind(cache=cache)
    values = kind.read(cache)
    if values.dtype != E4M3FN:
        raise ValueError(f"cache: dtype {values.dtype} must be {E4M3FN}")
    bits = values.view(np.uint8)
    if not (np.abs(_VALUES) > FP8_MAX)[bits].any():
        return cache, 1.0
    return kind.give(_HALVED[bits].view(E4M3FN)), 2.0
