"""The host function of decode: arguments checked, the step planned, one launch."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..reference.attention import queries_per_kv_head
from .addresses import used_blocks
from .arrays import array_kind, read_optional
from .device.paged_decode_nki import paged_decode_kernel
from .launch import Launch, execute, run
from .plan.decode_plan import plan_decode
from .plan.decode_shape import MOST_PLAN_BYTES, decode_shape
from .sizes import PARTITIONS
from .validation import (
    FP8_DTYPES,
    Array,
    check_cache_scale,
    check_caches,
    check_choice,
    check_cores,
    check_count,
    check_dtypes,
    check_integers,
    check_scale,
    check_shape,
    check_sinks,
    check_window,
    device_fp8,
)


def paged_decode(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_tables: Any,
    context_lens: Any,
    *,
    query_lens: Any = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    sinks: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    k_pre_transposed: bool = False,
    softmax: str = "auto",
    lnc: int = 1,
) -> Any:
    """Attention of the last tokens of B requests over their cached tokens, their own included.

    q [B, H, T, d], T >= 1, at most 128 rows of H / KV * T; caches [num_blocks, KV, block_size, d];
    block_tables [B, max_blocks] and context_lens [B] int32; query_lens [B] int32 within 0..T, None
    is T. Query t of request b is real when t < query_lens[b], at position
    context_lens[b] - query_lens[b] + t; other rows are zero. Returns out [B, H, T, d].
    """
    return run(
        prepare_paged_decode(
            q, k_cache, v_cache, block_tables, context_lens, query_lens=query_lens, scale=scale,
            sliding_window=sliding_window, sinks=sinks, k_scale=k_scale, v_scale=v_scale,
            k_pre_transposed=k_pre_transposed, softmax=softmax, lnc=lnc,
        )
    )  # fmt: skip


def prepare_paged_decode(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_tables: Any,
    context_lens: Any,
    *,
    query_lens: Any = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    sinks: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    k_pre_transposed: bool = False,
    softmax: str = "auto",
    lnc: int = 1,
) -> Launch[Any]:
    """The checked and planned launch of `paged_decode`."""
    kind = array_kind(
        q=q, k_cache=k_cache, v_cache=v_cache, block_tables=block_tables, context_lens=context_lens
    )
    q_, k_rows, v_rows, tables, lengths = map(
        kind.read, (q, k_cache, v_cache, block_tables, context_lens)
    )
    lnc = check_cores(lnc)
    check_choice("softmax", softmax, ("auto", "exact"))
    check_shape("q", q_, (None, None, None, None), "B, H, T, d")
    num_requests, num_q_heads, num_queries, head_dim = q_.shape
    check_caches(k_rows, v_rows, None, head_dim, k_pre_transposed)
    check_dtypes(q_.dtype, {}, {"k_cache": k_rows, "v_cache": v_rows})
    group = queries_per_kv_head(num_q_heads, k_rows.shape[1])
    if group * num_queries > PARTITIONS:
        raise ValueError(
            f"q: {group} query heads per KV head times T={num_queries} must be at most {PARTITIONS}"
        )
    check_integers("block_tables", tables, (num_requests, None))
    check_integers("context_lens", lengths, (num_requests,))
    queries = read_optional(kind, query_lens)
    if queries is None:
        queries = np.full(num_requests, num_queries, np.int32)
    check_integers("query_lens", queries, (num_requests,))
    block_size = v_rows.shape[2]
    for i in range(num_requests):
        check_count(f"context_lens[{i}]", lengths[i], tables.shape[1] * block_size)
        check_count(f"query_lens[{i}]", queries[i], num_queries)
    num_kv_heads = k_rows.shape[1]
    tables = used_blocks("block_tables", tables, lengths, v_rows, 1)
    window = check_window(sliding_window)
    shape = decode_shape(
        num_requests, num_kv_heads, group * num_queries, num_queries, head_dim, q_.dtype.itemsize,
        tables.shape[1] * block_size, window is not None, lnc, k_pre_transposed,
        k_rows.dtype in FP8_DTYPES,
    )  # fmt: skip
    if shape.plan_bytes(num_queries, lnc) > MOST_PLAN_BYTES:
        raise ValueError(
            f"block_tables: shape {tables.shape} with T={num_queries} needs a plan of "
            f"{shape.plan_bytes(num_queries, lnc)} bytes, must be at most {MOST_PLAN_BYTES}: give "
            "shorter tables or fewer requests"
        )
    factors = (
        check_scale(scale, head_dim),
        check_sinks(read_optional(kind, sinks), num_q_heads),
        check_cache_scale("k_scale", read_optional(kind, k_scale), k_rows),
        check_cache_scale("v_scale", read_optional(kind, v_scale), v_rows),
    )

    def launch(of_queries: Array, finish: Callable[[Array], Any]) -> Launch[Any]:
        plan = plan_decode(
            shape, tables, lengths, of_queries, num_queries, window, block_size, num_kv_heads, lnc,
            head_dim if k_pre_transposed else None,
        )  # fmt: skip
        arrays = (
            q_, device_fp8(k_rows), device_fp8(v_rows), *plan.arrays(), shape.heads, shape.tokens,
            shape.slots, *factors, *plan.key_arrays(),
        )  # fmt: skip
        return Launch(paged_decode_kernel, lnc, arrays, finish)

    def finish(out: Array) -> Any:
        for request in np.flatnonzero(~np.isfinite(out).all(axis=(1, 2, 3))):
            # Those that share slots or edge tiles share NaN and infinity; alone, a request has its
            # own.
            if num_requests > 1:
                own = np.where(np.arange(num_requests) == request, queries, 0)
                out[request] = execute(launch(own, kind.give))[request]
        return kind.give(out)

    return launch(queries, finish)
