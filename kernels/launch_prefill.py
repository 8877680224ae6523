"""The host functions of prefill: arguments checked, one launch, an exact one where it fails."""

from dataclasses import dataclass, replace
from typing import Any, SupportsIndex

import numpy as np

from ..reference.paging import cdiv
from .addresses import check_padding_slots, check_slots, used_blocks
from .arrays import array_kind, read_optional
from .device.padded_prefill_nki import chunk_attention_kernel, padded_prefill_kernel
from .device.segmented_attention_nki import segmented_attention_kernel
from .launch import Launch, execute, run
from .plan.cache_writes import write_arguments
from .plan.window_plan import window_columns, window_slots
from .sizes import PARTITIONS, TABLE_PADDING
from .validation import (
    Array,
    check_cache_scale,
    check_caches,
    check_chunk,
    check_cores,
    check_count,
    check_dtypes,
    check_integers,
    check_scale,
    check_segment_size,
    check_sinks,
    check_softmax,
    check_window,
    check_writable_caches,
    check_written_rows,
    device_fp8,
)

LONGEST_SEGMENT = 2048
"""Most tokens of a segment on chip: a longer kv_segment_size is read in segments of this size."""


@dataclass(frozen=True)
class _Chunk:
    """The checked arguments that both functions have."""

    q: Array
    k: Array
    v: Array
    count: int
    scale: float
    window: int | None
    sinks: Array | None
    softmax: str
    """As asked for: "auto", "bounded" or "exact"."""

    @property
    def first_softmax(self) -> str:
        """What is launched first."""
        return "exact" if self.softmax == "exact" else "bounded"


def padded_prefill(
    q: Any,
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    slot_mapping: Any,
    num_tokens: SupportsIndex,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    sinks: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    k_pre_transposed: bool = False,
    softmax: str = "auto",
    lnc: int = 1,
    return_lse: bool = False,
) -> tuple[Any, ...]:
    """Causal attention of a chunk without prior, and its cache write.

    q [H, S, d]; k, v [KV, S, d]; caches [num_blocks, KV, block_size, d]; slot_mapping [S] int32;
    0 <= num_tokens <= S. Returns (out [H, S, d], k_cache, v_cache), and lse [H, S] with return_lse.
    """
    return run(
        prepare_padded_prefill(
            q, k, v, k_cache, v_cache, slot_mapping, num_tokens, scale=scale,
            sliding_window=sliding_window, sinks=sinks, k_scale=k_scale, v_scale=v_scale,
            k_pre_transposed=k_pre_transposed, softmax=softmax, lnc=lnc,
            return_lse=return_lse,
        )
    )  # fmt: skip


def prepare_padded_prefill(
    q: Any,
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    slot_mapping: Any,
    num_tokens: SupportsIndex,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    sinks: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    k_pre_transposed: bool = False,
    softmax: str = "auto",
    lnc: int = 1,
    return_lse: bool = False,
) -> Launch[tuple[Any, ...]]:
    """The launch of `padded_prefill` with these arguments.

    Its kernel writes the caches. With softmax="auto" its `finish` launches the exact softmax where
    the check of the bounded one fails.
    """
    kind = array_kind(q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping)
    q_, k_, v_, slots = map(kind.read, (q, k, v, slot_mapping))
    k_rows, v_rows = kind.open_cache(k_cache), kind.open_cache(v_cache)
    cores = check_cores(lnc)
    check_chunk(q_, k_, v_)
    check_caches(k_rows, v_rows, k_.shape[0], q_.shape[2], k_pre_transposed)
    check_dtypes(q_.dtype, {"k": k_, "v": v_}, {"k_cache": k_rows, "v_cache": v_rows})
    check_writable_caches(k_rows, v_rows, q=q_, k=k_, v=v_)
    check_integers("slot_mapping", slots, (q_.shape[1],))
    check_slots(slots, v_rows)
    check_written_rows(k_)
    count = check_count("num_tokens", num_tokens, q_.shape[1])
    check_padding_slots(slots, count)
    window = check_window(sliding_window)
    mode = check_softmax(softmax, q_, q_.shape[1])
    chunk = _Chunk(
        q_, k_, v_, count, check_scale(scale, q_.shape[2]), window,
        check_sinks(read_optional(kind, sinks), q_.shape[0]), mode,
    )  # fmt: skip
    scales = (
        check_cache_scale("k_scale", read_optional(kind, k_scale), k_rows),
        check_cache_scale("v_scale", read_optional(kind, v_scale), v_rows),
    )
    before = [cache.copy() for cache in (k_rows, v_rows)] if mode == "bounded" else []

    def finish(results: tuple[Array, ...]) -> tuple[Any, ...]:
        out, _, _, flags, *lse = results
        if flags.any() and mode == "auto":
            out, _, *lse = execute(_exact_chunk(chunk, cores, return_lse))
        elif flags.any():
            k_rows[...], v_rows[...] = before
            raise _check_failed(flags)
        caches = kind.close_cache(k_cache, k_rows), kind.close_cache(v_cache, v_rows)
        return (kind.give(out), *caches, *map(kind.give, lse))

    writes, key_writes = write_arguments(slots, k_, v_rows.shape[2], k_pre_transposed)
    arrays = (
        q_, k_, v_, device_fp8(k_rows), device_fp8(v_rows), *writes, _number(count), chunk.scale,
        window, chunk.sinks, *scales, chunk.first_softmax, return_lse,
        *key_writes,
    )  # fmt: skip
    return Launch(padded_prefill_kernel, cores, arrays, finish)


def _exact_chunk(chunk: _Chunk, cores: int, with_lse: bool) -> Launch[Any]:
    """The attention of a chunk over itself, with the exact softmax."""
    arrays = (
        chunk.q, chunk.k, chunk.v, _number(chunk.count), chunk.scale, chunk.window, chunk.sinks,
        "exact", with_lse,
    )  # fmt: skip
    return Launch(chunk_attention_kernel, cores, arrays, lambda results: results)


def segmented_attention(
    q: Any,
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    prior_tokens: SupportsIndex,
    num_tokens: SupportsIndex,
    *,
    kv_segment_size: SupportsIndex = 2048,
    scale: float | None = None,
    sliding_window: int | None = None,
    sinks: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    k_pre_transposed: bool = False,
    softmax: str = "auto",
    lnc: int = 1,
    return_lse: bool = False,
) -> Any:
    """Causal attention of a chunk over `prior_tokens` cached tokens and itself.

    q [H, S, d]; k, v [KV, S, d]; caches [num_blocks, KV, block_size, d]; block_table [max_blocks]
    int32, of which the first ceil(prior_tokens / block_size) entries are looked at. The prior is
    read in segments of kv_segment_size tokens, a multiple of 128 and of block_size; more than 2048
    are read in pieces of 2048. Returns out [H, S, d], with return_lse (out, lse [H, S]).
    """
    return run(
        prepare_segmented_attention(
            q, k, v, k_cache, v_cache, block_table, prior_tokens, num_tokens,
            kv_segment_size=kv_segment_size, scale=scale, sliding_window=sliding_window,
            sinks=sinks, k_scale=k_scale, v_scale=v_scale, k_pre_transposed=k_pre_transposed,
            softmax=softmax, lnc=lnc,
            return_lse=return_lse,
        )
    )  # fmt: skip


def prepare_segmented_attention(
    q: Any,
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    prior_tokens: SupportsIndex,
    num_tokens: SupportsIndex,
    *,
    kv_segment_size: SupportsIndex = 2048,
    scale: float | None = None,
    sliding_window: int | None = None,
    sinks: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    k_pre_transposed: bool = False,
    softmax: str = "auto",
    lnc: int = 1,
    return_lse: bool = False,
) -> Launch[Any]:
    """The launch of `segmented_attention` with these arguments.

    With softmax="auto" its `finish` launches the exact softmax where the check of the bounded one
    fails.
    """
    kind = array_kind(q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache, block_table=block_table)
    q_, k_, v_, k_rows, v_rows, table = map(kind.read, (q, k, v, k_cache, v_cache, block_table))
    cores = check_cores(lnc)
    check_chunk(q_, k_, v_)
    check_caches(k_rows, v_rows, k_.shape[0], q_.shape[2], k_pre_transposed)
    check_dtypes(q_.dtype, {"k": k_, "v": v_}, {"k_cache": k_rows, "v_cache": v_rows})
    block_size = v_rows.shape[2]
    segment = check_segment_size(kv_segment_size, block_size)
    check_integers("block_table", table, (table.size,))
    segment = _covering_segment(segment, table.size * block_size)
    prior = check_count("prior_tokens", prior_tokens, table.size * block_size)
    count = check_count("num_tokens", num_tokens, q_.shape[1])
    tables = used_blocks(
        "block_table",
        table[None],
        np.array([prior]),
        v_rows,
        segment // block_size,
        TABLE_PADDING // block_size,
    )
    window = check_window(sliding_window)
    most_tokens = table.size * block_size + q_.shape[1]
    if window is not None and window >= most_tokens:
        window = None
    mode = check_softmax(softmax, q_, most_tokens)
    chunk = _Chunk(
        q_, k_, v_, count, check_scale(scale, q_.shape[2]), window,
        check_sinks(read_optional(kind, sinks), q_.shape[0]), mode,
    )  # fmt: skip
    k_factors = check_cache_scale("k_scale", read_optional(kind, k_scale), k_rows)
    v_factors = check_cache_scale("v_scale", read_optional(kind, v_scale), v_rows)
    slots = window_slots(
        tables[0], prior, window, block_size, q_.shape[1], q_.shape[2], q_.dtype.itemsize
    )
    columns = window_columns(slots, prior, block_size) if k_pre_transposed else ()
    kept = (
        q_, k_, v_, device_fp8(k_rows), device_fp8(v_rows), tables, _number(prior), _number(count),
        segment, chunk.scale, window, chunk.sinks, k_factors, v_factors,
    )  # fmt: skip
    layout = (return_lse, k_pre_transposed, slots, *columns)

    def give(results: tuple[Array, ...]) -> Any:
        out, _, *lse = results
        return (kind.give(out), kind.give(lse[0])) if lse else kind.give(out)

    exact = Launch(segmented_attention_kernel, cores, (*kept, "exact", *layout), give)
    if chunk.softmax == "exact":
        return exact

    def finish(results: tuple[Array, ...]) -> Any:
        flags = results[1]
        if not flags.any():
            return give(results)
        if chunk.softmax == "bounded":
            raise _check_failed(flags)
        return run(exact)

    return replace(exact, arrays=(*kept, "bounded", *layout), finish=finish)


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


def _number(value: int) -> Array:
    """A runtime value as the kernels take it: [1, 1] int32."""
    return np.array([[value]], np.int32)
