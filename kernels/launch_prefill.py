"""The host functions of prefill: arguments checked, one launch, an exact one where it fails."""

from dataclasses import replace
from typing import Any, SupportsIndex, Unpack

import numpy as np

from ..reference.paging import PAD_SLOT_ID, cdiv
from .addresses import check_padding_slots, check_slots, used_blocks
from .arrays import array_kind
from .device.padded_prefill_nki import chunk_attention_kernel, padded_prefill_kernel
from .device.segmented_attention_nki import segmented_attention_kernel
from .fp8 import E4M3FN, check_e4m3fn
from .launch import Launch, execute, launched, run
from .options import (
    ATTENTION,
    SEGMENTED,
    AttentionOptions,
    SegmentedOptions,
    with_defaults,
)
from .plan.cache_writes import write_arguments
from .plan.window_plan import window_columns, window_slots
from .prefill_chunk import PrefillChunk, checked_chunk, number
from .shape_checks import (
    check_apart,
    check_segment_size,
    check_written_rows,
)
from .sizes import PARTITIONS, SHORT_SEGMENT, TABLE_PADDING
from .validation import (
    Array,
    check_count,
    check_integers,
)

LONGEST_SEGMENT = 2048
"""Most tokens of a segment on chip: a longer kv_segment_size is read in segments of this size."""


@with_defaults(ATTENTION)
def prepare_padded_prefill(
    q: Any,
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    slot_mapping: Any,
    num_tokens: SupportsIndex,
    **options: Unpack[AttentionOptions],
) -> Launch[tuple[Any, ...]]:
    """Causal attention of a chunk without prior, and its cache write.

    With causal=False every query sees all `num_tokens` keys.

    q [H, S, d]; k, v [KV, S, d]; caches [num_blocks, KV, block_size, d]; slot_mapping [S] int32;
    0 <= num_tokens <= S. The launch, or `padded_prefill` of the same arguments, writes the caches
    and gives (out [H, S, d], k_cache, v_cache), and lse [H, S] with return_lse. With softmax="auto"
    `run` launches the exact softmax as well where the check of the bounded one fails.
    """
    kind = array_kind(q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping)
    q_, k_, v_, slots = map(kind.read, (q, k, v, slot_mapping))
    k_rows, v_rows = kind.open_cache(k_cache), kind.open_cache(v_cache)
    chunk = checked_chunk(kind, (q_, k_, v_, k_rows, v_rows), num_tokens, None, options)
    check_apart(k_rows, v_rows, q=q_, k=k_, v=v_)
    slots = check_integers("slot_mapping", slots, (q_.shape[1],))
    check_slots(slots, v_rows)
    check_written_rows("k", k_)
    check_written_rows("v", v_)
    check_padding_slots(slots, int(chunk.count[0, 0]))
    before = [cache.copy() for cache in (k_rows, v_rows)] if chunk.mode == "bounded" else []

    def finish(results: tuple[Array, ...]) -> tuple[Any, ...]:
        out, _, _, flags, *lse = results
        if flags.any() and chunk.mode == "auto":
            out, _, *lse = execute(_exact_chunk(chunk))
        elif flags.any():
            k_rows[...], v_rows[...] = before
            raise _check_failed(flags)
        caches = kind.close_cache(k_cache, k_rows), kind.close_cache(v_cache, v_rows)
        out, *lse = (kind.give(chunk.of_rows(each)) for each in (out, *lse))
        return (out, *caches, *lse)

    assert chunk.k is not None, "checked to be an array"
    slots = chunk.caches.slots(slots)
    slots = np.pad(slots, (0, chunk.k.shape[1] - len(slots)), constant_values=PAD_SLOT_ID)
    writes, key_writes = write_arguments(
        slots, chunk.k, v_.shape[2], chunk.caches.page_size, options["k_pre_transposed"]
    )
    arrays = (
        *chunk.arrays, *writes, chunk.count, chunk.first_softmax, *chunk.scales, *key_writes,
    )  # fmt: skip
    return Launch(padded_prefill_kernel, chunk.cores, arrays, finish)


padded_prefill = launched(prepare_padded_prefill)
"""Attention of a chunk without prior, and its cache write: `prepare_padded_prefill`, run at once.
"""


def _exact_chunk(chunk: PrefillChunk) -> Launch[Any]:
    """The attention of a chunk over itself, with the exact softmax."""
    arrays = (chunk.q, chunk.k, chunk.v, chunk.count, chunk.softmax, chunk.factors.sinks)
    return Launch(chunk_attention_kernel, chunk.cores, arrays, lambda results: results)


@with_defaults(SEGMENTED)
def prepare_segmented_attention(
    q: Any,
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    prior_tokens: SupportsIndex,
    num_tokens: SupportsIndex,
    **options: Unpack[SegmentedOptions],
) -> Launch[Any]:
    """Causal attention of a chunk over `prior_tokens` cached tokens and itself.

    With causal=False every query sees all cached tokens and the chunk's `num_tokens` keys. k and v
    None are cross attention then: `num_tokens` queries see the cached tokens alone, with the exact
    softmax.

    q [H, S, d]; k, v [KV, S, d]; caches [num_blocks, KV, block_size, d]; block_table [max_blocks]
    int32, of which the first ceil(prior_tokens / block_size) entries are looked at. The prior is
    read in segments of kv_segment_size tokens (2048), a multiple of 128 and of block_size; more
    than 2048 are read in pieces of 2048. The launch, or `segmented_attention` of the same
    arguments, gives out [H, S, d], with return_lse (out, lse [H, S]). With softmax="auto" `run`
    launches the exact softmax as well where the check of the bounded one fails.
    """
    given = {"k": k, "v": v}
    own = {name: array for name, array in given.items() if array is not None}
    kind = array_kind(q=q, **own, k_cache=k_cache, v_cache=v_cache, block_table=block_table)
    q_, table = kind.read(q), kind.read(block_table)
    k_rows, v_rows = kind.view(k_cache), kind.view(v_cache)
    k_, v_ = (None if array is None else kind.read(array) for array in given.values())
    table = check_integers("block_table", table, (table.size,))
    chunk = checked_chunk(kind, (q_, k_, v_, k_rows, v_rows), num_tokens, table.size, options)
    block_size = v_rows.shape[2]
    table_tokens = table.size * block_size
    segment = check_segment_size(options["kv_segment_size"], block_size)
    segment = _covering_segment(segment, table_tokens)
    if chunk.softmax.in_order:
        segment = SHORT_SEGMENT
    prior = check_count("prior_tokens", prior_tokens, table_tokens)
    tables = used_blocks(
        "block_table",
        table[None],
        np.array([prior]),
        v_rows,
        segment // block_size,
        TABLE_PADDING // block_size,
    )
    tables, page_size = chunk.caches.tables(tables), chunk.caches.page_size
    window, columns = chunk.softmax.window, options["k_pre_transposed"]
    tokens = [(0 if window is None else max(0, prior - window + 1), prior)]
    if k_rows.dtype == E4M3FN:
        check_e4m3fn("k_cache", chunk.caches.k, tables, tokens, k_pre_transposed=columns)
        check_e4m3fn("v_cache", chunk.caches.v, tables, tokens)
    slots = window_slots(
        tables[0],
        prior,
        window,
        page_size,
        chunk.q.shape[1],
        q_.shape[2],
        q_.dtype.itemsize,
    )
    shifted = window_columns(slots, prior, page_size) if columns else ()
    before = (*chunk.arrays, tables, number(prior), chunk.count, segment)
    behind = (*chunk.scales, columns, slots, *shifted)

    def give(results: tuple[Array, ...]) -> Any:
        out, _, *lse = results
        given = [kind.give(chunk.of_rows(each)) for each in (out, *lse)]
        return tuple(given) if lse else given[0]

    arrays = (*before, chunk.softmax, *behind)
    exact = Launch(segmented_attention_kernel, chunk.cores, arrays, give)
    if chunk.mode == "exact":
        return exact

    def finish(results: tuple[Array, ...]) -> Any:
        flags = results[1]
        if not flags.any():
            return give(results)
        if chunk.mode == "bounded":
            raise _check_failed(flags)
        return run(exact)

    return replace(exact, arrays=(*before, chunk.first_softmax, *behind), finish=finish)


segmented_attention = launched(prepare_segmented_attention)
"""Attention of a chunk over cached tokens and itself: `prepare_segmented_attention`, run at once.
"""


def _check_failed(flags: Array) -> FloatingPointError:
    """Of softmax="bounded", which has no fallback."""
    heads = np.flatnonzero(flags.any(0)).tolist()
    return FloatingPointError(
        f"softmax='bounded': row sums or results of the queries from head(s) {heads} on "
        "left the accurate range; softmax='auto' falls back to the exact softmax"
    )


def _covering_segment(segment: int, table_tokens: int) -> int:
    """`segment`, or less when SBUF or the block table holds less: whole tiles of 128 tokens."""
    return min(segment, LONGEST_SEGMENT, max(1, cdiv(table_tokens, PARTITIONS)) * PARTITIONS)
