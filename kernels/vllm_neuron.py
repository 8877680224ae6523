"""The attention calls of vLLM Neuron's models, served by our kernels.

    import segattn.kernels.vllm_neuron as NF

    NF.segmented_attention      the call of `vllm_neuron.functional.segmented_attention`
    NF.write_paged_kv_cache     for the body of a model's `_write_paged_kv_cache`
    NF.decode_attention         for what lies between RoPE and the output projection in a model's
                                `forward_decode`, whose `attention_decode` is one fused block

Arguments, layouts and padding are those that the models pass (vllm-project/vllm-neuron,
vllm_neuron/model/qwen3/model_bf16.py at 04c112d). Padding is block 0, vLLM's null block, in block
tables and slots, as well as -1: its keys are absent, and nothing is written there. The shipped code
writes padding into the null block. Packed fp8 keys are read by `segmented_attention` alone.
"""

from typing import Any, TypedDict, Unpack

import numpy as np

from ..reference.paging import NULL_BLOCK_ID, PAD_SLOT_ID, UNUSED_BLOCK, cdiv
from .arrays import Array, ArrayKind, array_kind
from .aws_segmented import attention_segmented_cte
from .launch_decode import DecodePlan, paged_decode
from .launch_write import write_kv_cache
from .options import ATTENTION, AttentionOptions, check_factors, with_defaults
from .validation import check_choice, check_integers, check_shape


def segmented_attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_tables: Any,
    prior_tokens: Any,
    block_size: int,
    kv_segment_size: int,
    scale: float,
    tp_q: bool = True,
    tp_out: bool = False,
    sliding_window: int | None = None,
    sink: Any = None,
    fp8_packed: bool = False,
    k_scale: Any = None,
    v_scale: Any = None,
    *,
    lnc: int = 2,
) -> Any:
    """Causal attention of a chunk, whose K and V are in the cache, over its prior and itself.

    q [H, S, d], with tp_q=False [H, d, S]; block_tables [1, W]; prior_tokens [1, 1]; caches as of
    `attention_segmented_cte`, which this calls. Any S, prior and window is taken. Gives [H, S, d],
    or with tp_out [H, d, S]; rows whose block is padding are zero.
    """
    kind = array_kind(q=q, k_cache=k_cache, v_cache=v_cache, block_tables=block_tables)
    return attention_segmented_cte(
        q=q, k_cache=k_cache, v_cache=v_cache, block_tables=_without_null(kind, block_tables),
        prior_tokens=prior_tokens, block_size=block_size,
        prior_seg_size=kv_segment_size, scale=scale, tp_q=tp_q, tp_out=tp_out,
        sliding_window=sliding_window, sink=sink, num_q_heads=q.shape[0], fp8_packed=fp8_packed,
        k_scale=k_scale, v_scale=v_scale, lnc=lnc,
    )  # fmt: skip


def write_paged_kv_cache(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    slot_mapping: Any,
    block_size: int,
    k_scale: Any = None,
    v_scale: Any = None,
) -> tuple[Any, Any]:
    """Store k and v [KV, N, d] in the caches [num_blocks, KV, block_size, d]; give the caches.

    slot_mapping [N]: a slot of block 0, a negative one and one beyond the cache are padding. A
    quantised cache stores value times scale, as the models do: the scale of our other functions is
    its reciprocal.
    """
    kind = array_kind(k=k, v=v, k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping)
    check_choice("block_size", block_size, (v_cache.shape[2],))
    slots = _real_slots(kind.read(slot_mapping), v_cache.shape[0], block_size)
    return write_kv_cache(
        k, v, k_cache, v_cache, kind.give(slots),
        k_scale=_reciprocal(kind, k_scale), v_scale=_reciprocal(kind, v_scale),
    )  # fmt: skip


class DecodeNumbers(TypedDict, total=False):
    """Options of decode_attention, named as the shipped call names them."""

    softmax_scale: float | None
    """Of the real keys; None is 1 / sqrt(d)."""
    sliding_window: int | None
    sink: Any
    """[H] fp32."""
    k_scale: Any
    """What real keys are multiplied by to be stored: a number or [KV]."""
    v_scale: Any
    lnc: int


DECODE_NUMBERS: DecodeNumbers = {
    "softmax_scale": None, "sliding_window": None, "sink": None, "k_scale": None, "v_scale": None,
    "lnc": 2,
}  # fmt: skip


@with_defaults(DECODE_NUMBERS)
def decode_attention(
    q: Any,
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    active_blocks_table: Any,
    positions: Any,
    kv_cache_update_idx: Any,
    **options: Unpack[DecodeNumbers],
) -> Any:
    """Store the new tokens of B requests, then attend with them: the middle of `forward_decode`.

    q [B * T, H, d], k, v [B * T, KV, d] after RoPE; caches [num_blocks, KV, block_size, d];
    active_blocks_table [B, W]; positions and kv_cache_update_idx [B * T] or [B, T]. Rows of
    position 0 are padding, behind the real ones of a request, whose positions follow each other.
    softmax_scale is that of the real keys: without the factor 1 / k_scale that the shipped call
    needs, and the output projection goes without 1 / v_scale. Gives [B * T, H, d], zero in padding.
    """
    kind = array_kind(
        q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache, active_blocks_table=active_blocks_table,
        positions=positions, kv_cache_update_idx=kv_cache_update_idx,
    )  # fmt: skip
    q_, k_, v_ = map(kind.read, (q, k, v))
    check_shape("q", q_, (None, None, None), "B * T, H, d")
    batch, num_rows = active_blocks_table.shape[0], q_.shape[0]
    check_choice("B * T", num_rows, (cdiv(num_rows, batch) * batch,))
    context, real = _lengths(kind.read(positions).reshape(batch, -1), num_rows // batch)
    slots = kind.read(kv_cache_update_idx).reshape(batch, -1).astype(np.int64)
    stored = np.where(np.arange(slots.shape[1]) < real[:, None], slots, PAD_SLOT_ID).ravel()
    keys, values = (kind.give(np.ascontiguousarray(each.swapaxes(0, 1))) for each in (k_, v_))
    queries = q_.reshape(batch, -1, *q_.shape[1:]).swapaxes(1, 2)
    queries = kind.give(np.ascontiguousarray(queries))
    sink = options["sink"]
    numbers: AttentionOptions = {
        "scale": options["softmax_scale"],
        "sinks": None if sink is None else kind.read(sink).ravel(),
        "k_scale": _reciprocal(kind, options["k_scale"]),
        "v_scale": _reciprocal(kind, options["v_scale"]),
    }
    # All that attention could refuse, before anything is written.
    plan = DecodePlan.build(
        queries, k_cache, v_cache, _without_null(kind, active_blocks_table), kind.give(context),
        query_lens=real, sliding_window=options["sliding_window"] or None, lnc=options["lnc"],
    )  # fmt: skip
    views = kind.read(queries), kind.view(k_cache), kind.view(v_cache)
    check_factors({**ATTENTION, **numbers}, kind, *views)
    k_cache, v_cache = write_paged_kv_cache(
        keys, values, k_cache, v_cache, kind.give(stored), v_cache.shape[2], options["k_scale"],
        options["v_scale"],
    )  # fmt: skip
    out = paged_decode(queries, k_cache, v_cache, plan=plan, **numbers)
    rows = kind.read(out).swapaxes(1, 2).reshape(q_.shape)
    return kind.give(np.ascontiguousarray(rows))


def _without_null(kind: ArrayKind, tables: Any) -> Any:
    """Block tables with -1 for the null block."""
    blocks = check_integers("block_tables", kind.read(tables), (None, None))
    return kind.give(np.where(blocks == NULL_BLOCK_ID, UNUSED_BLOCK, blocks).astype(np.int32))


def _real_slots(slots: Array, num_blocks: int, block_size: int) -> Array:
    """Slots as int32; -1 for those of the null block and outside of the cache."""
    wide = slots.astype(np.int64)
    first = (NULL_BLOCK_ID + 1) * block_size
    real = (wide >= first) & (wide < num_blocks * block_size)
    return np.where(real, wide, PAD_SLOT_ID).astype(np.int32)


def _lengths(positions: Array, num_queries: int) -> tuple[Array, Array]:
    """Tokens in the cache and real queries of each request, from positions [B, T]."""
    check_shape("positions", positions, (None, num_queries))
    whole = positions.astype(np.int64)
    real = (whole > 0).sum(1)
    expected = whole[:, :1] + np.arange(num_queries)
    wrong = np.where(np.arange(num_queries) < real[:, None], whole != expected, whole != 0)
    if wrong.any():
        request = int(np.flatnonzero(wrong.any(1))[0])
        raise ValueError(
            f"positions[{request}]={whole[request].tolist()}: must follow each other, then be 0"
        )
    context = np.where(real > 0, whole[:, 0] + real, 0)
    return context.astype(np.int32), real.astype(np.int32)


def _reciprocal(kind: ArrayKind, scale: Any) -> Any:
    """What stored values are multiplied by, from what real ones are: one number, or [KV]."""
    if scale is None:
        return None
    values = np.asarray(scale if isinstance(scale, (int, float)) else kind.read(scale), np.float32)
    if not (values > 0).all():
        raise ValueError(f"scale={scale}: must be positive")
    return 1 / (values.reshape(()) if values.size == 1 else values.ravel())
