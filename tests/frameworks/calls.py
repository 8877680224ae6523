"""One call of each kernel as NumPy arrays, for the frameworks to make in their own arrays.

Rows that nothing may read hold NaN or infinity.
"""

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from segattn.tests.kernels.cases import padded_rows, paged_tokens

Array = npt.NDArray[Any]

BF16 = ml_dtypes.bfloat16
FP8 = ml_dtypes.float8_e4m3fn


@dataclass
class Call:
    """Arguments of one kernel: arrays and numbers in order, options by name."""

    kernel: str
    arguments: list[Any]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def caches(self) -> tuple[int, int]:
        """Where the caches stand among the arguments."""
        first = {"paged_decode": 1, "write_kv_cache": 2}.get(self.kernel, 3)
        return first, first + 1


def make_call(
    kernel: str,
    dtype: npt.DTypeLike,
    *,
    fp8: bool = False,
    every: bool = False,
    without: bool = False,
) -> Call:
    """A small call with 2 query heads per KV head; `every` gives every option a value.

    without: a chunk without keys of its own (cross attention), a decode without V cache.
    """
    rng = np.random.default_rng(0)
    kv_heads, heads, d, block_size = 2, 4, 64, 32
    prior, n, lengths = 150, 40, [70, 0, 33]
    paged = paged_tokens(
        rng, lengths if kernel == "paged_decode" else [prior], kv_heads, d, block_size,
        FP8 if fp8 else dtype,
    )  # fmt: skip
    caches: list[Any] = [paged.k_cache, paged.v_cache]
    options: dict[str, Any] = {}
    if every:
        caches[0] = np.ascontiguousarray(paged.k_cache.swapaxes(2, 3))
        options["k_pre_transposed"] = True
    if kernel != "write_kv_cache" and every:
        sinks = rng.uniform(-3, 3, heads).astype(np.float32)
        options.update(scale=0.2, sliding_window=90, sinks=sinks, softmax="exact", lnc=2)
        options.update(softcap=20.0, deterministic="batch")
    if fp8 or every:
        scales = rng.uniform(0.1, 0.5, (2, kv_heads)).astype(np.float32)
        options.update(k_scale=scales[0], v_scale=scales[1])
    q, k, v = (padded_rows(rng, each, 128, n, d, dtype) for each in (heads, kv_heads, kv_heads))
    slots = np.full(128, -1, np.int32)
    slots[:n] = rng.permutation(paged.k_cache.shape[0] * block_size)[:n]
    if kernel == "segmented_attention":
        if every:
            options["kv_segment_size"] = 128
        if without:
            options["causal"] = False
            return Call(kernel, [q, None, None, *caches, paged.tables[0], prior, n], options)
        return Call(kernel, [q, k, v, *caches, paged.tables[0], prior, n], options)
    if kernel == "paged_decode":
        queries = rng.standard_normal((3, heads, 2, d)).astype(dtype)
        if every:
            options["query_lens"] = np.array([2, 0, 1], np.int32)
            options["tree_mask"] = np.broadcast_to(np.eye(2, dtype=bool), (3, 2, 2)).copy()
        if without:
            caches[1], options["value_dim"] = None, 48
        return Call(kernel, [queries, *caches, paged.tables, np.array(lengths, np.int32)], options)
    if kernel == "padded_prefill":
        return Call(kernel, [q, k, v, *caches, slots, n], options)
    return Call(kernel, [k, v, *caches, slots], options)


KERNELS = ("segmented_attention", "padded_prefill", "paged_decode", "write_kv_cache")
VARIANTS = {
    "fp32": {"dtype": np.float32},
    "bf16 with every option": {"dtype": BF16, "every": True},
    "fp8 caches": {"dtype": BF16, "fp8": True},
}

every_call = pytest.mark.parametrize(
    ("kernel", "variant"),
    [(kernel, variant) for kernel in KERNELS for variant in VARIANTS.values()]
    + [(kernel, {"dtype": BF16, "without": True}) for kernel in KERNELS[::2]],
    ids=[f"{kernel}, {name}" for kernel in KERNELS for name in VARIANTS]
    + ["cross attention", "decode without V cache"],
)
