"""The call of AWS's `attention_segmented_cte` (nkilib, SDK 2.32), served by segmented_attention.

A runner written for that kernel imports this function instead. Names, order and defaults of the
arguments are the documented ones. Their restrictions are not: S_q need not equal prior_seg_size,
and prior_tokens and sliding_window need not be multiples of block_size.

The chunk's keys and values lie in the cache already, behind the prior. They are copied out of it on
the host, KV * S_q * d elements each; who has them at hand calls `segmented_attention` with them.
"""

from typing import Any

import numpy as np

from ..reference.paging import UNUSED_BLOCK
from .addresses import used_blocks
from .arrays import array_kind
from .launch_prefill import segmented_attention
from .validation import (
    QUANTISED_DTYPES,
    Array,
    check_choice,
    check_count,
    check_integers,
    check_shape,
)


def attention_segmented_cte(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_tables: Any,
    prior_tokens: Any,
    block_size: int,
    prior_seg_size: int,
    scale: float = 1.0,
    tp_q: bool = True,
    tp_out: bool = False,
    sliding_window: int | None = None,
    sink: Any = None,
    num_q_heads: int = 1,
    k_pre_transposed: bool = False,
    fp8_packed: bool = False,
    k_scale: Any = None,
    v_scale: Any = None,
    kvp_q_offset: Any = None,
    kvp_rank_id: Any = None,
    kvp_group_size: int = 0,
    kvp_cp_offset_int: int = 0,
    kvp_seg_block_offset_int: int = 0,
    kvp_prior_load_blocks: int = 0,
    kvp_prior_fully_visible: bool = False,
    *,
    softmax: str = "auto",
    lnc: int = 1,
) -> Any:
    """Causal attention of chunks over their prior and themselves, all of it in the cache.

    q [B * num_q_heads, S_q, d], with tp_q=False [B * num_q_heads, d, S_q];
    v_cache [num_blocks, KV, block_size, d] and k_cache alike, or
        [num_blocks * KV, d, block_size] with k_pre_transposed,
        [num_blocks, block_size / 2, KV * d, 2] with fp8_packed;
    block_tables [B, max_blocks] int32: the blocks of the prior and, behind it, of the chunk. -1 in
    the prior: these keys are absent; -1 in the chunk: its rows from there on are padding, and so
        are rows at its end whose stored keys or values are not finite;
    prior_tokens int32, [1, 1] for all requests or [B, 1];
    sliding_window None or 0: no window; sink fp32, one number per row of q's first axis;
    k_scale, v_scale: stored value times scale is the real one; AWS's [128, 1], all entries equal,
    or a number.

    Returns [B * num_q_heads, S_q, d], or with tp_out [B * num_q_heads, d, S_q]; padding is zero.
    ValueError as in `segmented_attention`, and for the KV-parallel mode (`kvp_*`), in which a rank
    returns statistics for others to merge.
    """
    kvp = {
        "kvp_q_offset": kvp_q_offset, "kvp_rank_id": kvp_rank_id,
        "kvp_group_size": kvp_group_size or None, "kvp_cp_offset_int": kvp_cp_offset_int or None,
        "kvp_seg_block_offset_int": kvp_seg_block_offset_int or None,
        "kvp_prior_load_blocks": kvp_prior_load_blocks or None,
        "kvp_prior_fully_visible": kvp_prior_fully_visible or None,
    }  # fmt: skip
    for name, value in kvp.items():
        if value is not None:
            raise ValueError(f"{name}={value}: the KV-parallel mode is not supported")
    kind = array_kind(q=q, k_cache=k_cache, v_cache=v_cache, block_tables=block_tables)
    queries, tables = kind.read(q), kind.read(block_tables)
    keys, values = kind.view(k_cache), kind.view(v_cache)
    check_shape("q", queries, (None, None, None))
    check_shape("v_cache", values, (None, None, None, None))
    check_choice("block_size", block_size, (values.shape[2],))
    tables = check_integers("block_tables", tables, (None, None))
    if not tp_q:
        queries = np.ascontiguousarray(queries.swapaxes(1, 2))
    num_requests, num_rows = len(tables), queries.shape[1]
    check_choice("num_q_heads", num_q_heads, (len(queries) / num_requests,))
    if k_pre_transposed:
        num_blocks, num_kv_heads, _, d = values.shape
        check_shape("k_cache", keys, (num_blocks * num_kv_heads, d, block_size))
        keys = keys.reshape(num_blocks, num_kv_heads, d, block_size)
    elif fp8_packed:
        keys = _unpacked(keys, values.shape)
    else:
        check_shape("k_cache", keys, values.shape)
    key_rows = keys.swapaxes(2, 3) if k_pre_transposed else keys
    priors = np.asarray(prior_tokens)
    check_choice("prior_tokens.size", priors.size, (1, num_requests))
    priors = np.broadcast_to(priors.ravel(), num_requests)
    for prior in priors:
        check_count("prior_tokens", prior, tables.shape[1] * block_size)
    used = used_blocks("block_tables", tables, priors + num_rows, values, 1)
    # Stored values are exact in the dtype of q, scaled ones are not: the scales act on the scores
    # and on the result.
    key_scale, value_scale = _one_number("k_scale", k_scale), _one_number("v_scale", v_scale)
    stored: dict[str, Any] = {}
    if keys.dtype in QUANTISED_DTYPES:
        stored = {"k_scale": 1.0, "v_scale": 1.0}
    logits: list[Any] = [None] * num_requests
    if sink is not None:
        sinks = np.asarray(sink).ravel()
        check_choice("sink.size", sinks.size, (len(queries),))
        logits = list(sinks.reshape(num_requests, num_q_heads))
    out = np.empty_like(queries)
    for request in range(num_requests):
        heads = slice(request * num_q_heads, (request + 1) * num_q_heads)
        rows = _chunk_rows(used[request], int(priors[request]), num_rows, block_size)
        count, own_keys, own_values = _chunk(key_rows, values, rows, num_rows, queries.dtype)
        out[heads] = segmented_attention(
            queries[heads], own_keys, own_values, keys, values, tables[request], priors[request],
            count, kv_segment_size=prior_seg_size, scale=scale * key_scale,
            sliding_window=sliding_window or None, sinks=logits[request], softmax=softmax, lnc=lnc,
            k_pre_transposed=k_pre_transposed, **stored,
        )  # fmt: skip
    if value_scale != 1.0:
        out = (out.astype(np.float32) * np.float32(value_scale)).astype(out.dtype)
    return kind.give(np.ascontiguousarray(out.swapaxes(1, 2)) if tp_out else out)


def _unpacked(keys: Array, shape: tuple[int, ...]) -> Array:
    """A K cache that packs two tokens per feature as [num_blocks, KV, block_size, d]."""
    num_blocks, num_kv_heads, block_size, d = shape
    check_shape("k_cache", keys, (num_blocks, block_size // 2, num_kv_heads * d, 2))
    pairs = keys.reshape(num_blocks, block_size // 2, num_kv_heads, d, 2)
    return pairs.transpose(0, 2, 1, 4, 3).reshape(shape)


def _chunk_rows(table: Array, prior: int, num_rows: int, block_size: int) -> Array:
    """(block, offset) of each real row of the chunk, [rows, 2]: those before the first -1."""
    positions = prior + np.arange(num_rows)
    blocks = table[positions // block_size]
    absent = blocks == UNUSED_BLOCK
    count = int(absent.argmax()) if absent.any() else num_rows
    if not absent[count:].all():
        where = int(positions[count] // block_size)
        raise ValueError(f"block_tables: -1 at {where} within the chunk, must be behind it")
    return np.stack([blocks, positions % block_size], axis=1)[:count]


def _chunk(
    keys: Array, values: Array, rows: Array, num_rows: int, dtype: np.dtype[Any]
) -> tuple[int, Array, Array]:
    """How many rows of the chunk are real, and its keys and values [KV, num_rows, d].

    The call does not say where the chunk ends within its last block. What lies behind its end may
    be anything, and a NaN there must not reach the sums of the rows before it.
    """
    own = [
        cache[rows[:, 0], :, rows[:, 1]].swapaxes(0, 1).astype(dtype) for cache in (keys, values)
    ]
    finite = np.flatnonzero(np.isfinite(own[0]).all((0, 2)) & np.isfinite(own[1]).all((0, 2)))
    count = int(finite[-1]) + 1 if finite.size else 0
    padding = ((0, 0), (0, num_rows - count), (0, 0))
    padded_keys, padded_values = (np.pad(each[:, :count], padding) for each in own)
    return count, padded_keys, padded_values


def _one_number(name: str, scale: Any) -> float:
    """AWS's scale tensor, which repeats one number; no scale is 1."""
    if scale is None:
        return 1.0
    values = np.asarray(scale, np.float32).ravel()
    if not (values == values[:1]).all() or not values[:1] > 0:
        raise ValueError(f"{name}={values}: must repeat one positive number")
    return float(values[0])
