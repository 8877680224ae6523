"""segmented_attention keeps every rule from the field, at level error."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from segattn.kernels import prepare_segmented_attention
from segattn.reference import attention as reference
from segattn.reference.nki import strict
from segattn.tests.kernels.cases import assert_close, padded_rows, paged_tokens

BF16 = ml_dtypes.bfloat16


@pytest.mark.parametrize("softmax", ["bounded", "exact"])
@pytest.mark.parametrize(
    ("heads", "rows", "n", "prior", "options"),
    [
        ((4, 1), 256, 200, 700, {}),
        ((12, 3), 384, 346, 3000, {"lnc": 2}),
        ((3, 1), 384, 300, 700, {"lnc": 2}),
        ((1, 1), 128, 100, 700, {"lnc": 2}),
        ((4, 2), 256, 200, 700, {"lnc": 2, "k_pre_transposed": True}),
        ((3, 1), 256, 200, 700, {"lnc": 2, "k_scale": 0.5, "v_scale": 0.25}),
        ((4, 2), 256, 200, 700, {"sliding_window": 300}),
        ((4, 2), 256, 200, 700, {"sliding_window": 300, "k_pre_transposed": True, "lnc": 2}),
    ],
)
def test_no_rule_is_broken(
    softmax: str, heads: tuple[int, int], rows: int, n: int, prior: int, options: dict[str, Any],
) -> None:  # fmt: skip
    rng = np.random.default_rng(0)
    cache_dtype = ml_dtypes.float8_e4m3 if "k_scale" in options else BF16
    paged = paged_tokens(rng, [prior], heads[1], 64, 16, cache_dtype, holes=0.1)
    k_cache = paged.k_cache
    if options.get("k_pre_transposed"):
        k_cache = np.ascontiguousarray(k_cache.swapaxes(2, 3))
    q = padded_rows(rng, heads[0], rows, n, 64, BF16)
    k, v = (padded_rows(rng, heads[1], rows, n, 64, BF16) for _ in range(2))
    call = (q, k, v, k_cache, paged.v_cache, paged.tables[0], prior, n)
    launch = prepare_segmented_attention(*call, softmax=softmax, kv_segment_size=512, **options)
    with strict(field="error"):
        out = launch.finish(launch.kernel[launch.grid](*launch.arrays))
    assert_close(out[:, :n], reference.segmented_attention(*call, **options)[:, :n])
