"""The chunk of a prefill call: its checked arguments, as both kernels take them."""

from dataclasses import dataclass
from typing import SupportsIndex

import numpy as np

from ..reference.attention import queries_per_kv_head
from .arrays import ArrayKind
from .cache_layout import PagedCaches, read_in_place, written_in_place
from .options import (
    AttentionOptions,
    Factors,
    check_factors,
)
from .shape_checks import (
    check_caches,
    check_chunk,
    check_cross,
    check_queries,
    check_value_dim,
)
from .sizes import PARTITIONS, SoftmaxArguments
from .validation import (
    Array,
    check_choice,
    check_cores,
    check_count,
    check_dtypes,
    check_shape,
    check_softmax,
    check_window,
    device_fp8,
)


@dataclass(frozen=True)
class PrefillChunk:
    """The checked arguments that both functions have; rows are padded to whole tiles of 128."""

    num_rows: int
    """S."""
    q: Array
    k: Array | None
    v: Array | None
    caches: PagedCaches
    count: Array
    """[1, 1] int32, real rows."""
    factors: Factors
    mode: str
    """As asked for: "auto", "bounded" or "exact"."""
    softmax: SoftmaxArguments
    """The exact one."""
    cores: int

    @property
    def first_softmax(self) -> SoftmaxArguments:
        """What is launched first."""
        if self.mode == "exact":
            return self.softmax
        return self.softmax._replace(mode="bounded")

    def of_rows(self, result: Array) -> Array:
        """Out or lse [H, padded rows, ...] as [H, S, ...]."""
        return np.ascontiguousarray(result[:, : self.num_rows])

    @property
    def arrays(self) -> tuple[Array | None, ...]:
        """The first arguments of both kernels."""
        caches = device_fp8(self.caches.k), device_fp8(self.caches.v)
        return self.q, self.k, self.v, *caches

    @property
    def scales(self) -> tuple[Array | None, Array | None, Array | None]:
        """Sinks and scales of the caches."""
        return self.factors.sinks, self.factors.k_scales, self.factors.v_scales


def checked_chunk(
    kind: ArrayKind,
    arrays: tuple[Array, Array | None, Array | None, Array, Array],
    num_tokens: SupportsIndex,
    table_blocks: int | None,
    options: AttentionOptions,
) -> PrefillChunk:
    """Q, k, v, caches as NumPy arrays, and options; table_blocks: of a prior,
    None: there is none, and the caches are written.
    """
    q, k, v, k_cache, v_cache = arrays
    cores = check_cores(options["lnc"])
    causal = options["causal"]
    window = check_window(options["sliding_window"], causal)
    num_kv_heads: int | None = None
    own: dict[str, Array] = {}
    if k is None or v is None:
        check_cross(k, v, causal, options["softmax"])
        check_shape("v_cache", v_cache, (None, None, None, None))
        value_dim = v_cache.shape[3]
        check_queries(q, value_dim)
        check_value_dim("v_cache", value_dim, q.shape[2])
    else:
        check_chunk(q, k, v)
        value_dim = v.shape[2]
        num_kv_heads, own = k.shape[0], {"k": k, "v": v}
    check_caches(k_cache, v_cache, num_kv_heads, q.shape[2], options["k_pre_transposed"], value_dim)
    queries_per_kv_head(q.shape[0], k_cache.shape[1])
    check_dtypes(q.dtype, own, {"k_cache": k_cache, "v_cache": v_cache})
    num_rows = q.shape[1]
    count = check_count("num_tokens", num_tokens, num_rows)
    q = _whole_tiles(q)
    k, v = (None if each is None else _whole_tiles(each) for each in (k, v))
    most_tokens = (table_blocks or 0) * v_cache.shape[2] + q.shape[1]
    deterministic = options["deterministic"]
    check_choice("deterministic", deterministic, (None, "batch"))
    in_order = deterministic == "batch"
    if window is not None and window >= most_tokens and not in_order:
        window = None
    mode = check_softmax(options["softmax"], q, value_dim, most_tokens) if own else "exact"
    if in_order:
        check_choice("softmax with deterministic='batch'", options["softmax"], ("auto", "exact"))
        mode = "exact"
    factors = check_factors(options, kind, q, k_cache, v_cache)
    softmax = SoftmaxArguments(
        factors.numbers, window, "exact", bool(options["return_lse"]), bool(causal), in_order
    )
    in_place = written_in_place if table_blocks is None else read_in_place
    caches = in_place(k_cache, v_cache, options["k_pre_transposed"])
    return PrefillChunk(num_rows, q, k, v, caches, number(count), factors, mode, softmax, cores)


def _whole_tiles(rows: Array) -> Array:
    """Rows [heads, S, d], and zeros up to a multiple of 128."""
    missing = -rows.shape[1] % PARTITIONS
    return np.pad(rows, ((0, 0), (0, missing), (0, 0))) if missing else rows


def number(value: int) -> Array:
    """A runtime value as the kernels take it: [1, 1] int32."""
    return np.array([[value]], np.int32)
