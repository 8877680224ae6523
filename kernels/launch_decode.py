"""The host functions of decode: a step is planned once, each layer is checked and launched."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex, Unpack, cast

import numpy as np

from ..reference.attention import queries_per_kv_head
from .addresses import used_blocks
from .arrays import Array, ArrayKind, array_kind, read_optional
from .cache_layout import PagedCaches, read_in_place
from .device.decode.batch import DecodeSizes
from .device.paged_decode_nki import paged_decode_kernel
from .fp8 import E4M3FN, check_e4m3fn
from .launch import Launch, execute, launched
from .options import DECODE, PLAN, DecodeOptions, PlanOptions, check_factors, with_defaults
from .plan.decode_plan import DecodeLists, plan_lists
from .plan.decode_shape import MOST_PLAN_BYTES, DecodeCall, DecodeShape, decode_shape
from .plan.decode_step import Step
from .shape_checks import DECODE_KEY_DIMS, DECODE_VALUE_DIMS, check_caches, check_head_dim
from .sizes import PARTITIONS
from .validation import (
    check_choice,
    check_cores,
    check_count,
    check_dtypes,
    check_integer,
    check_integers,
    check_shape,
    check_tree_mask,
    check_window,
    device_fp8,
)


@dataclass(frozen=True)
class DecodePlan:
    """The work of one decode step, the same for all layers: make it once with `build`."""

    step: Step
    shape: DecodeShape
    lists: DecodeLists
    k_pre_transposed: bool
    value_dim: int | None
    """Values are so many features of the keys."""
    layer: tuple[tuple[int, ...], ...]
    """Shapes of q and the pages of the caches, which all layers share, bytes of their elements, and
    the layout of the pages."""

    @classmethod
    @with_defaults(PLAN)
    def build(
        cls,
        q: Any,
        k_cache: Any,
        v_cache: Any,
        block_tables: Any,
        context_lens: Any,
        **options: Unpack[PlanOptions],
    ) -> "DecodePlan":
        """Plan a step; arguments as those of `paged_decode`.

        q and the caches are those of any layer: only their shapes and dtypes count.
        """
        kind = array_kind(
            q=q, k_cache=k_cache, **_given(v_cache), block_tables=block_tables,
            context_lens=context_lens,
        )  # fmt: skip
        q_, tables, lengths = map(kind.read, (q, block_tables, context_lens))
        k_rows = kind.view(k_cache)
        lnc = check_cores(options["lnc"])
        causal = options["causal"]
        window = check_window(options["sliding_window"], causal)
        deterministic, columns = options["deterministic"], options["k_pre_transposed"]
        check_choice("deterministic", deterministic, (None, "batch"))
        v_rows = _values(kind, k_rows, v_cache, options["value_dim"], columns)
        group = _check_layer(q_, k_rows, v_rows, columns)
        num_requests, _, num_queries, head_dim = q_.shape
        num_kv_heads, block_size = v_rows.shape[1:3]
        tables = check_integers("block_tables", tables, (num_requests, None))
        lengths = check_integers("context_lens", lengths, (num_requests,))
        queries = read_optional(kind, options["query_lens"])
        if queries is None:
            queries = np.full(num_requests, num_queries, np.int32)
        queries = check_integers("query_lens", queries, (num_requests,))
        _check_counts("context_lens", lengths, tables.shape[1] * block_size)
        _check_counts("query_lens", queries, num_queries)
        tree = read_optional(kind, options["tree_mask"])
        check_tree_mask(tree, causal, queries, num_queries)
        tables = used_blocks("block_tables", tables, lengths, v_rows, 1)
        caches = read_in_place(k_rows, k_rows if v_cache is None else v_rows, columns)
        tables, page_size = caches.tables(tables), caches.page_size
        # int8 becomes the dtype of q on chip.
        staged_bytes = (q_ if k_rows.dtype == np.int8 else k_rows).dtype.itemsize
        shape = decode_shape(
            DecodeCall(
                num_requests, num_kv_heads, group * num_queries, num_queries,
                max(head_dim, v_rows.shape[3]), page_size,
                staged_bytes, tables.shape[1] * page_size, window is not None, lnc,
                columns and page_size > 1, deterministic == "batch",
                tree is not None,
            )
        )  # fmt: skip
        if shape.plan_bytes(lnc) > MOST_PLAN_BYTES:
            raise ValueError(
                f"block_tables: shape {tables.shape} with T={num_queries} needs a plan of "
                f"{shape.plan_bytes(lnc)} bytes, must be at most {MOST_PLAN_BYTES}: give shorter "
                "tables or fewer requests"
            )
        step = Step(
            tables, lengths, queries, window, page_size, num_kv_heads, lnc, bool(causal), tree
        )
        layer = _layer_of(q_, caches)
        return cls(step, shape, plan_lists(shape, step), columns, options["value_dim"], layer)

    def only(self, request: int | np.integer[Any]) -> "DecodePlan":
        """The same step without the other requests."""
        others = np.arange(len(self.step.query_lens)) != request
        step = replace(self.step, query_lens=np.where(others, 0, self.step.query_lens))
        return replace(self, step=step, lists=plan_lists(self.shape, step))


@with_defaults(DECODE)
def prepare_paged_decode(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_tables: Any = None,
    context_lens: Any = None,
    *,
    plan: DecodePlan | None = None,
    **options: Unpack[DecodeOptions],
) -> Launch[Any]:
    """Attention of the last tokens of B requests over their cached tokens, their own included.

    q [B, H, T, d], T >= 1, at most 128 rows of H / KV * T; caches [num_blocks, KV, block_size, d];
    block_tables [B, max_blocks] and context_lens [B] int32; query_lens [B] int32 within 0..T, None
    is T. Query t of request b is real when t < query_lens[b], at position
    context_lens[b] - query_lens[b] + t; other rows are zero. With causal=False it sees all
    context_lens[b] tokens, which need not be its own: cross attention. The launch, or
    `paged_decode` of the same arguments, gives out [B, H, T, d], with return_lse
    (out, lse [B, H, T]).

    tree_mask [B, T, T] bool is for drafts in a tree: query t of request b sees all tokens before
    the request's last query_lens[b], and of those the j-th if tree_mask[b, t, j]; itself always. A
    sliding window still counts positions in the cache.

    The V cache may have a head size dv other than that of q and the K cache: out is [B, H, T, dv].
    With v_cache None the values are the first `value_dim` features of the keys: MLA in its absorbed
    form, one latent head of 512 features and 64 of rope. Mind the scale, which is that of the
    unabsorbed heads; k_scale and v_scale concern keys and values as they do elsewhere.

    A `plan` of the step stands for block_tables, context_lens and all options of `DecodePlan.build`
    (query_lens, tree_mask, value_dim, causal, sliding_window, k_pre_transposed, lnc,
    deterministic), which are not given then.

    deterministic="batch": the bits of a request's rows do not depend on the other requests, on its
    place among them, on the width of the table or on lnc. Short contexts then share no work tile.
    """
    check_choice("softmax", options["softmax"], ("auto", "exact"))
    by_name: Mapping[str, Any] = options
    of_step = {name: by_name[name] for name in PLAN}
    if plan is None:
        build: Callable[..., DecodePlan] = DecodePlan.build
        plan = build(q, k_cache, v_cache, block_tables, context_lens, **of_step)
    else:
        _check_alone(block_tables, context_lens, of_step)
    kind = array_kind(q=q, k_cache=k_cache, **_given(v_cache))
    q_, k_rows = kind.read(q), kind.view(k_cache)
    v_rows = _values(kind, k_rows, v_cache, plan.value_dim, plan.k_pre_transposed)
    _check_layer(q_, k_rows, v_rows, plan.k_pre_transposed)
    caches = read_in_place(k_rows, k_rows if v_cache is None else v_rows, plan.k_pre_transposed)
    if _layer_of(q_, caches) != plan.layer:
        raise ValueError(
            f"plan: made for q, pages of the caches, bytes per element and layout "
            f"{plan.layer}, not for {_layer_of(q_, caches)}"
        )
    if k_rows.dtype == E4M3FN:
        tables, tokens = plan.step.tables, plan.step.seen_tokens
        columns = plan.k_pre_transposed
        check_e4m3fn("k_cache", caches.k, tables, tokens, k_pre_transposed=columns)
        if v_cache is not None:
            check_e4m3fn("v_cache", caches.v, tables, tokens)
    factors = check_factors(options, kind, q_, k_rows, v_rows)
    return_lse = bool(options["return_lse"])

    def launch(plan: DecodePlan, finish: Callable[[Any], Any]) -> Launch[Any]:
        shape = plan.shape
        sizes = DecodeSizes(shape.tokens, shape.edge_tokens, shape.tiles, shape.part_segments)
        arrays = (
            q_, device_fp8(caches.k), None if v_cache is None else device_fp8(caches.v),
            *plan.lists.arrays(), sizes,
            factors.numbers, factors.sinks, factors.k_scales, factors.v_scales,
            plan.k_pre_transposed, return_lse, v_rows.shape[3],
        )  # fmt: skip
        return Launch(paged_decode_kernel, plan.step.num_cores, arrays, finish)

    def finish(result: Array | tuple[Array, Array]) -> Any:
        # Requests that share a work tile share NaN and infinity; alone, a request has its own.
        every = _results(result)
        for request in (
            np.flatnonzero(~np.isfinite(every[0]).all(axis=(1, 2, 3))) if len(every[0]) > 1 else ()
        ):
            alone = _results(execute(launch(plan.only(request), finish)))
            for all_of_it, own in zip(every, alone, strict=True):
                all_of_it[request] = own[request]
        return tuple(map(kind.give, every)) if return_lse else kind.give(every[0])

    return launch(plan, finish)


paged_decode = launched(prepare_paged_decode)
"""Attention of requests' last tokens: `prepare_paged_decode`, run at once."""


def _results(result: Array | tuple[Array, Array]) -> tuple[Array, ...]:
    """The kernel's output, and lse if it was asked for."""
    return result if isinstance(result, tuple) else (result,)


def _check_layer(q: Array, k_cache: Array, v_cache: Array, k_pre_transposed: bool) -> int:
    """Shapes and dtypes of a layer; query heads per KV head."""
    check_shape("q", q, (None, None, None, None), "B, H, T, d")
    _, num_q_heads, num_queries, head_dim = q.shape
    check_shape("v_cache", v_cache, (None, None, None, None))
    value_dim = v_cache.shape[3]
    check_caches(k_cache, v_cache, None, head_dim, k_pre_transposed, value_dim, DECODE_KEY_DIMS)
    check_head_dim("v_cache.shape[3]", value_dim, DECODE_VALUE_DIMS)
    check_dtypes(q.dtype, {}, {"k_cache": k_cache, "v_cache": v_cache})
    group = queries_per_kv_head(num_q_heads, k_cache.shape[1])
    if group * num_queries > PARTITIONS:
        raise ValueError(
            f"q: {group} query heads per KV head times T={num_queries} must be at most {PARTITIONS}"
        )
    return group


def _layer_of(q: Array, caches: PagedCaches) -> tuple[tuple[int, ...], ...]:
    """What the layers of a step share: shapes, bytes of elements, and where blocks are in pages."""
    arrays = (q, caches.k, caches.v)
    own = caches.layout
    return (
        *(array.shape for array in arrays), tuple(array.dtype.itemsize for array in arrays),
        (own.page_count, own.step, own.first),
    )  # fmt: skip


def _given(v_cache: Any) -> dict[str, Any]:
    """The V cache by its name, if there is one."""
    return {} if v_cache is None else {"v_cache": v_cache}


def _values(
    kind: ArrayKind, k_rows: Array, v_cache: Any, value_dim: int | None, k_pre_transposed: bool
) -> Array:
    """The V cache, or a view of the K cache's first `value_dim` features."""
    if v_cache is not None:
        if value_dim is not None:
            raise ValueError(f"value_dim={value_dim}: must be None with a v_cache")
        return kind.view(v_cache)
    if k_pre_transposed:
        raise ValueError("v_cache=None: must be an array with k_pre_transposed")
    check_shape("k_cache", k_rows, (None, None, None, None))
    width = check_integer("value_dim without v_cache", cast(SupportsIndex, value_dim))
    check_head_dim("value_dim", width, DECODE_VALUE_DIMS)
    if width > k_rows.shape[3]:
        raise ValueError(f"value_dim={width}: must be at most {k_rows.shape[3]}, that of the keys")
    return k_rows[..., :width]


def _check_counts(name: str, counts: Array, most: int) -> None:
    """Counts are within 0..most."""
    for i in np.flatnonzero((counts < 0) | (counts > most))[:1].tolist():
        check_count(f"{name}[{i}]", counts[i], most)


def _check_alone(block_tables: Any, context_lens: Any, of_step: Mapping[str, Any]) -> None:
    """A plan comes without the arguments that it stands for."""
    given = {"block_tables": block_tables, "context_lens": context_lens, **of_step}
    for name, value in given.items():
        if value is not PLAN.get(name):
            raise ValueError(f"{name}: given with a plan, which holds it")
