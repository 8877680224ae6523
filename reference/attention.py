"""The definition of every kernel: plain NumPy in float64, one query row at a time.

Names, arguments and their order are those of `segattn.kernels`. Shapes, with H query heads on
KV heads (head h reads KV head h // (H / KV)), d the head size:

    q                 [H, S, d];  paged_decode: [B, H, T, d]
    k, v              [KV, S, d]        the chunk's own keys and values, unquantised
    k_cache, v_cache  [num_blocks, KV, block_size, d];  with k_pre_transposed the K cache is
                      [num_blocks, KV, d, block_size]
    block_table       [max_blocks] int32, -1 = these keys are absent;  decode: [B, max_blocks]
    slot_mapping      [S] int32, -1 = the token is not written
    causal            False: a query sees every token, of the chunk and of the cache
    tree_mask         [B, T, T] bool: query t sees new token j, instead of those up to its own
    softcap           c > 0: scores are c * tanh(scores / c); 0: they are not capped
    sinks             [H]               a logit that joins the softmax sum once, without a value
    k_scale, v_scale  number or [KV]    real value = stored value x scale

Query row i of a chunk stands at position prior_tokens + i and sees the keys at positions
max(0, position - sliding_window + 1) .. position. With causal=False, which has no window, it sees
all keys of the prior and of the chunk's real rows. Without k and v (None) it sees the prior alone:
cross attention. A row that sees no key is zero, as is every row past the real ones. Only rows that
are named here are ever read, so whatever lies in padding or in unused cache rows has no influence.
Any S, d and block size is taken. Attention is returned in float64, that is before the kernels' one
cast to the dtype of q. `kv_segment_size`, `softmax`, `lnc` and `deterministic` say how a kernel
works, not what it computes: they change nothing here.

With return_lse the result has lse [H, S] ([B, H, T]) as its last part: the natural logarithm of
each row's softmax sum, the sink included, -inf where the row is not real or sees no key. Parts of
the keys that were attended apart are put together by `merge_attention`.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from .kv_cache import Array, Float64, by_row, cached_rows, write_kv_cache

__all__ = [
    "Array",
    "Float64",
    "merge_attention",
    "padded_prefill",
    "paged_decode",
    "queries_per_kv_head",
    "segmented_attention",
    "write_kv_cache",
]


def queries_per_kv_head(num_q_heads: int, num_kv_heads: int) -> int:
    """Query heads that share one KV head. ValueError unless the division is exact."""
    if num_kv_heads < 1 or num_q_heads < 1 or num_q_heads % num_kv_heads:
        raise ValueError(
            f"num_q_heads={num_q_heads} must be a positive multiple of num_kv_heads={num_kv_heads}"
        )
    return num_q_heads // num_kv_heads


def padded_prefill(
    q: Array,
    k: Array,
    v: Array,
    k_cache: Array,
    v_cache: Array,
    slot_mapping: Array,
    num_tokens: int,
    *,
    causal: bool = True,
    scale: float | None = None,
    softcap: float = 0.0,
    sliding_window: int | None = None,
    sinks: Array | None = None,
    k_scale: float | Array | None = None,
    v_scale: float | Array | None = None,
    k_pre_transposed: bool = False,
    softmax: str = "auto",
    lnc: int = 1,
    return_lse: bool = False,
    deterministic: str | None = None,
) -> Any:
    """Attention of a chunk without prior, whose K and V are stored through `slot_mapping`.

    Returns (out [H, S, d], k_cache, v_cache); the caches are updated in place.
    """
    no_keys, no_values = (np.empty((0, k_cache.shape[1], 1, each.shape[2])) for each in (k, v))
    no_blocks = np.empty(0, np.int32)
    out, lse = segmented_attention(
        q, k, v, no_keys, no_values, no_blocks, 0, num_tokens,
        causal=causal, scale=scale, softcap=softcap, sliding_window=sliding_window, sinks=sinks,
        return_lse=True,
    )  # fmt: skip
    write_kv_cache(
        k, v, k_cache, v_cache, slot_mapping,
        k_scale=k_scale, v_scale=v_scale, k_pre_transposed=k_pre_transposed,
    )  # fmt: skip
    return (out, k_cache, v_cache, lse) if return_lse else (out, k_cache, v_cache)


def segmented_attention(
    q: Array,
    k: Array | None,
    v: Array | None,
    k_cache: Array,
    v_cache: Array,
    block_table: Array,
    prior_tokens: int,
    num_tokens: int,
    *,
    kv_segment_size: int = 2048,
    causal: bool = True,
    scale: float | None = None,
    softcap: float = 0.0,
    sliding_window: int | None = None,
    sinks: Array | None = None,
    k_scale: float | Array | None = None,
    v_scale: float | Array | None = None,
    k_pre_transposed: bool = False,
    softmax: str = "auto",
    lnc: int = 1,
    return_lse: bool = False,
    deterministic: str | None = None,
) -> Any:
    """Attention of a chunk over `prior_tokens` cached tokens and itself. Returns out [H, S, d]."""
    num_q_heads, _, head_dim = q.shape
    k_cache = by_row(k_cache, k_pre_transposed)
    num_own = num_tokens
    if k is None or v is None:
        k, v, num_own = k_cache[:0, :, 0].swapaxes(0, 1), v_cache[:0, :, 0].swapaxes(0, 1), 0
    group = queries_per_kv_head(num_q_heads, k.shape[0])
    out, lse = np.zeros((*q.shape[:-1], v_cache.shape[3])), np.full(q.shape[:-1], -np.inf)
    for head in range(num_q_heads):
        kv_head = head // group
        prior_positions, prior_k, prior_v = cached_rows(
            kv_head, k_cache, v_cache, block_table, prior_tokens, k_scale, v_scale
        )
        own_positions = prior_tokens + np.arange(num_own)
        positions = np.concatenate([prior_positions, own_positions])
        keys = np.concatenate([prior_k, k[kv_head, :num_own].astype(np.float64)])
        values = np.concatenate([prior_v, v[kv_head, :num_own].astype(np.float64)])
        for row in range(num_tokens):
            seen = _seen(positions, prior_tokens + row, sliding_window, causal)
            out[head, row], lse[head, row] = _attend(
                q[head, row], keys[seen], values[seen],
                _scale(scale, head_dim), softcap, _sink(sinks, head),
            )  # fmt: skip
    return (out, lse) if return_lse else out


def varlen_attention(
    q: Array,
    k: Array,
    v: Array,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,
    prior_tokens: Array,
    cu_seqlens: Array,
    *,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """Attention of the chunks of P prompts, rows cu_seqlens[p] .. cu_seqlens[p + 1] - 1 each.

    q [H, N, d], k [KV, N, d], v [KV, N, dv], block_tables [P, W], prior_tokens [P]; options of
    `segmented_attention`. Returns out [H, N, dv], with return_lse and lse [H, N].
    """
    out, lse = np.zeros((*q.shape[:2], v.shape[2])), np.full(q.shape[:2], -np.inf)
    for prompt, prior in enumerate(prior_tokens.tolist()):
        rows = slice(cu_seqlens[prompt], cu_seqlens[prompt + 1])
        count = int(cu_seqlens[prompt + 1] - cu_seqlens[prompt])
        out[:, rows], lse[:, rows] = segmented_attention(
            q[:, rows], k[:, rows], v[:, rows], k_cache, v_cache, block_tables[prompt], prior,
            count, **options, return_lse=True,
        )  # fmt: skip
    return (out, lse) if return_lse else out


def paged_decode(
    q: Array,
    k_cache: Array,
    v_cache: Array | None,
    block_tables: Array,
    context_lens: Array,
    *,
    query_lens: Array | None = None,
    value_dim: int | None = None,
    tree_mask: Array | None = None,
    causal: bool = True,
    scale: float | None = None,
    softcap: float = 0.0,
    sliding_window: int | None = None,
    sinks: Array | None = None,
    k_scale: float | Array | None = None,
    v_scale: float | Array | None = None,
    k_pre_transposed: bool = False,
    softmax: str = "auto",
    lnc: int = 1,
    return_lse: bool = False,
    deterministic: str | None = None,
) -> Any:
    """Attention of the last tokens of B requests over their cached tokens, their own included.

    context_lens [B] counts the cached tokens of each request. query_lens [B], 0..T (None: T for
    every request with tokens): query t of request b is real when t < query_lens[b] and stands at
    position context_lens[b] - query_lens[b] + t. With a tree_mask it sees all tokens before the
    last query_lens[b] and of those the ones in row t of the request's mask, within a window of
    positions if there is one. Values may have another size than keys; without a v_cache they are
    the first `value_dim` features of the K cache, times v_scale. Returns out [B, H, T, that size].
    """
    num_requests, num_q_heads, num_queries, head_dim = q.shape
    k_cache = by_row(k_cache, k_pre_transposed)
    v_cache = k_cache[..., :value_dim] if v_cache is None else v_cache
    group = queries_per_kv_head(num_q_heads, k_cache.shape[1])
    out, lse = np.zeros((*q.shape[:-1], v_cache.shape[3])), np.full(q.shape[:-1], -np.inf)
    for request in range(num_requests):
        context = int(context_lens[request])
        real = num_queries if query_lens is None else int(query_lens[request])
        for head in range(num_q_heads if context > 0 else 0):
            positions, keys, values = cached_rows(
                head // group, k_cache, v_cache, block_tables[request], context, k_scale, v_scale
            )
            for t in range(real):
                seen = _seen(
                    positions, context - real + t, sliding_window, causal and tree_mask is None
                )
                if tree_mask is not None:
                    new = positions - (context - real)
                    seen &= (new < 0) | tree_mask[request, t, np.maximum(new, 0)]
                out[request, head, t], lse[request, head, t] = _attend(
                    q[request, head, t], keys[seen], values[seen],
                    _scale(scale, head_dim), softcap, _sink(sinks, head),
                )  # fmt: skip
    return (out, lse) if return_lse else out


def merge_attention(
    outs: Array, lses: Array, *, sinks: Array | None = None
) -> tuple[Float64, Float64]:
    """Attention over the union of N disjoint sets of keys from that over each.

    outs [N, ..., H, S, d], lses [N, ..., H, S], sinks [H]: they join the sum once, so the parts are
    attended without them. Returns (out [..., H, S, d], lse [..., H, S]), zero and -inf for a row
    that sees nothing in any part.
    """
    parts, own = lses.astype(np.float64), outs.astype(np.float64)
    largest = parts.max(axis=0)
    seen = ~np.isneginf(largest)
    sink = np.full(largest.shape[-2], -np.inf) if sinks is None else sinks.astype(np.float64)
    shift = np.where(seen, np.maximum(largest, sink[:, None]), 0.0)
    weights = np.exp(parts - shift)
    total = np.where(seen, weights.sum(axis=0) + np.exp(sink[:, None] - shift), 1.0)
    out = (weights[..., None] * own).sum(axis=0) / total[..., None]
    return out, np.where(seen, shift + np.log(total), -np.inf)


def _seen(
    positions: npt.NDArray[np.int64], position: int, window: int | None, causal: bool
) -> Array:
    """Which keys the query at `position` sees."""
    first = 0 if window is None else position - window + 1
    return (positions >= first) & ((positions <= position) | (not causal))


def _attend(
    query: Array, keys: Float64, values: Float64, scale: float, softcap: float, sink: float
) -> tuple[Float64, float]:
    """softmax(scale * keys . query) . values for one row, with `sink` in the sum, and its lse."""
    if not len(keys):
        return np.zeros(values.shape[1]), -np.inf
    scores = scale * (keys @ query.astype(np.float64))
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    shift = max(scores.max(), sink)
    weights = np.exp(scores - shift)
    total = weights.sum() + np.exp(sink - shift)
    return np.asarray(weights @ values / total), float(shift + np.log(total))


def _scale(scale: float | None, head_dim: int) -> float:
    return head_dim**-0.5 if scale is None else float(scale)


def _sink(sinks: Array | None, head: int) -> float:
    return -np.inf if sinks is None else float(sinks[head])
