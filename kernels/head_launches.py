"""The launches of one prefill call (launch_plan.py): all heads at once, or some at a time."""

from collections.abc import Callable

import numpy as np

from .launch_plan import LaunchPlan
from .validation import Array

Launch = Callable[[slice, slice, str], tuple[Array, Array]]
"""Attention [heads, S, d] and flags [cores, heads] of some query heads, on some KV heads, with a
softmax."""


def launch_heads(
    plan: LaunchPlan, num_q_heads: int, num_kv_heads: int, launch: Launch
) -> tuple[Array, Array]:
    """Attention [H, S, d] and flags [cores, H] of all heads."""
    outs, flags = [], []
    for heads in _slices(0, num_q_heads, plan.heads):
        kv_heads = _kv_heads(heads, num_q_heads, num_kv_heads)
        out, flag = launch(heads, kv_heads, plan.softmax)
        if plan.exact_heads is not None and flag.any():
            out = launch_exact(plan.exact_heads, heads, num_q_heads, num_kv_heads, launch)
        outs.append(out)
        flags.append(flag)
    return np.concatenate(outs), np.concatenate(flags, axis=1)


def launch_exact(
    heads_per_launch: int, heads: slice, num_q_heads: int, num_kv_heads: int, launch: Launch
) -> Array:
    """Attention of some heads with the exact softmax."""
    outs = []
    for some in _slices(heads.start, heads.stop, heads_per_launch):
        out, _ = launch(some, _kv_heads(some, num_q_heads, num_kv_heads), "exact")
        outs.append(out)
    return np.concatenate(outs)


def of_heads(numbers: Array | None, heads: slice) -> Array | None:
    """Numbers [1, H] of some heads."""
    return None if numbers is None else np.ascontiguousarray(numbers[:, heads])


def _slices(start: int, stop: int, step: int) -> list[slice]:
    return [slice(first, min(first + step, stop)) for first in range(start, stop, step)]


def _kv_heads(heads: slice, num_q_heads: int, num_kv_heads: int) -> slice:
    group = num_q_heads // num_kv_heads
    return slice(heads.start // group, (heads.stop - 1) // group + 1)
