"""The kernels as JAX functions that also work while JAX traces, as in `jax.jit` and `jax.vmap`.

Arguments, results and meanings are those of `segattn.kernels` with JAX arrays: caches that are
written come back as new arrays, so that the functions are pure. Under `jax.jit` the kernels run in
a host callback of the shapes known while tracing; numbers that are traced (`num_tokens`,
`prior_tokens`) may be scalars or arrays of one element. `causal`, `scale`, `softcap`,
`sliding_window`, `kv_segment_size`, `k_pre_transposed`, `softmax` and `lnc` are compiled in: Python
values. Under `jax.vmap` the kernel runs once per element, one after the other. No gradient is
defined.

A rejected argument is a ValueError; from a callback JAX may raise it as its own JaxRuntimeError,
whose message holds that of the ValueError.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np

from .. import kernels
from ..reference.extras import MissingExtraError

try:
    import jax
except ImportError as error:
    raise MissingExtraError("jax", "jax") from error

P = ParamSpec("P")
R = TypeVar("R")

COMPILED_IN = (
    "kv_segment_size", "causal", "scale", "softcap", "sliding_window", "k_pre_transposed",
    "softmax", "lnc", "value_dim", "deterministic",
)  # fmt: skip
"""Arguments that are Python values while JAX traces; all others are arrays."""


def _traceable(host: Callable[P, R], *like: str) -> Callable[P, R]:
    """A host function for traced arrays; its results have the shapes of the arguments `like`.

    Attention, in the place of q, is as wide as the values.
    """
    signature = inspect.signature(host)
    by_name: Callable[..., R] = host

    @wraps(host)
    def function(*positional: P.args, **named: P.kwargs) -> R:
        arguments = signature.bind(*positional, **named).arguments
        traced = {name: value for name, value in arguments.items() if name not in COMPILED_IN}
        if not any(isinstance(value, jax.core.Tracer) for value in jax.tree.leaves(traced)):
            return host(*positional, **named)
        fixed = {
            name: value for name, value in arguments.items() if name in COMPILED_IN or value is None
        }

        def run(values: dict[str, Any]) -> Any:
            return by_name(**{name: np.array(value) for name, value in values.items()}, **fixed)

        def shape_of(name: str) -> tuple[int, ...]:
            shape: tuple[int, ...] = arguments[name].shape
            if name != "q":
                return shape
            values = arguments["v_cache"]
            return (*shape[:-1], arguments["value_dim"] if values is None else values.shape[-1])

        shapes = tuple(jax.ShapeDtypeStruct(shape_of(name), arguments[name].dtype) for name in like)
        present = {name: value for name, value in traced.items() if value is not None}
        result: R = jax.pure_callback(
            run, shapes if len(like) > 1 else shapes[0], present, vmap_method="sequential"
        )
        return result

    return function


segmented_attention = _traceable(kernels.segmented_attention, "q")
padded_prefill = _traceable(kernels.padded_prefill, "q", "k_cache", "v_cache")
paged_decode = _traceable(kernels.paged_decode, "q")
write_kv_cache = _traceable(kernels.write_kv_cache, "k_cache", "v_cache")
