"""The options of the attention functions, each defined once: its type, meaning and default.

They are keywords of every function that has them. A `prepare_...` function takes them as
`**options`, typed by a TypedDict, and finds all of them there, with their defaults.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, SupportsIndex, TypedDict, TypeVar

from .arrays import Array, ArrayKind, read_optional
from .sizes import ScoreNumbers
from .validation import check_cache_scale, check_scale, check_sinks, check_softcap

P = ParamSpec("P")
R = TypeVar("R")


class AttentionOptions(TypedDict, total=False):
    """What all attention functions take."""

    causal: bool
    """False: a query sees all keys of prior and chunk; without a window."""
    scale: float | None
    """Factor of the scores, 1e-12 to 1e6; None is 1 / sqrt(head_dim)."""
    softcap: float
    """c, 0.01 to 1000: scores are c * tanh(scores / c), before sinks; 0 is no cap."""
    sliding_window: int | None
    """W >= 1: a token sees itself and the W - 1 before it."""
    sinks: Any
    """[H] fp32, one more logit in each row's sum, without a value."""
    k_scale: Any
    """Number or [KV]: stored key times scale is the real one. Needed with a cache of one byte."""
    v_scale: Any
    """The same of values."""
    k_pre_transposed: bool
    """The K cache is [num_blocks, KV, d, block_size]."""
    softmax: str
    """"exact", "bounded" or "auto"."""
    lnc: int
    """Physical cores, 1 or 2."""
    return_lse: bool
    """The natural logarithm of each row's softmax sum follows the results."""
    deterministic: str | None
    """"batch": the bits of a request's rows depend on that request alone."""


class SegmentedOptions(AttentionOptions, total=False):
    """Those of segmented_attention."""

    kv_segment_size: SupportsIndex
    """Tokens of the prior that are read at a time."""


class PlanOptions(TypedDict, total=False):
    """Those of a decode step, which all layers share."""

    query_lens: Any
    """[B] int32, real queries of each request; None is T."""
    value_dim: int | None
    """Without a V cache: values are so many features of the keys."""
    tree_mask: Any
    """[B, T, T] bool, which of its request's new tokens each query sees; None: up to its own."""
    causal: bool
    sliding_window: int | None
    k_pre_transposed: bool
    lnc: int
    deterministic: str | None
    """"batch": the bits of a request's rows do not depend on the other requests."""


class DecodeOptions(AttentionOptions, total=False):
    """Those of paged_decode."""

    query_lens: Any
    value_dim: int | None
    tree_mask: Any


ATTENTION: AttentionOptions = {
    "causal": True, "scale": None, "softcap": 0.0, "sliding_window": None, "sinks": None,
    "k_scale": None, "v_scale": None, "k_pre_transposed": False, "softmax": "auto", "lnc": 1,
    "return_lse": False, "deterministic": None,
}  # fmt: skip
SEGMENTED: SegmentedOptions = {"kv_segment_size": 2048, **ATTENTION}
PLAN: PlanOptions = {
    "query_lens": None, "value_dim": None, "tree_mask": None, "causal": True,
    "sliding_window": None, "k_pre_transposed": False, "lnc": 1, "deterministic": None,
}  # fmt: skip
DECODE: DecodeOptions = {
    "query_lens": None, "value_dim": None, "tree_mask": None, **ATTENTION,
}  # fmt: skip


def with_defaults(defaults: Mapping[str, Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Give a function all of its `**options`; its signature lists them as keywords.

    TypeError for a keyword that is none of them.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        given = inspect.signature(function)
        own = [p for p in given.parameters.values() if p.kind is not p.VAR_KEYWORD]
        keywords = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
            for name, default in defaults.items()
        ]
        known = {parameter.name for parameter in own} | defaults.keys()

        public_name = function.__name__.removeprefix("prepare_")

        @wraps(function)
        def complete(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs.keys() - known:
                raise TypeError(f"{public_name}() has no option {name!r}")
            return function(*args, **{**defaults, **kwargs})

        signature = given.replace(parameters=[*own, *keywords])
        complete.__signature__ = signature  # type: ignore[attr-defined]
        return complete

    return decorate


@dataclass(frozen=True)
class Factors:
    """The numbers of a layer's softmax and caches, checked, as kernels take them."""

    numbers: ScoreNumbers
    sinks: Array | None
    """[1, H] fp32."""
    k_scales: Array | None
    """[1, KV] fp32."""
    v_scales: Array | None
    """[1, KV] fp32."""


def check_factors(
    options: AttentionOptions, kind: ArrayKind, q: Array, k_cache: Array, v_cache: Array
) -> Factors:
    """Those of q [..., H, S, d] and its caches; ValueError naming the option."""
    return Factors(
        ScoreNumbers(check_scale(options["scale"], q.shape[-1]), check_softcap(options["softcap"])),
        check_sinks(read_optional(kind, options["sinks"]), q.shape[-3]),
        check_cache_scale("k_scale", read_optional(kind, options["k_scale"]), k_cache),
        check_cache_scale("v_scale", read_optional(kind, options["v_scale"]), v_cache),
    )
