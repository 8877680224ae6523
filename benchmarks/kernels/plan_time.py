"""Host time of decode: `python -m segattn.benchmarks.kernels.plan_time`.

A step is planned once and each layer is prepared with the plan. Times are medians of this machine,
taken in turn with the ones they stand beside: what counts is how they compare.
"""

from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import ml_dtypes
import numpy as np

from segattn.kernels import DecodePlan, prepare_paged_decode

STEPS = ((1, 32768, 1), (16, 2048, 1), (64, 2048, 1), (64, 2048, 8))
"""Requests, context, KV heads with 8 query heads each of 128."""

REPEATS = 50


def step_arguments(requests: int, context: int, kv_heads: int) -> tuple[Any, ...]:
    """q, caches, block tables and lengths of full contexts in blocks of 32 tokens."""
    blocks = context // 32
    q = np.zeros((requests, 8 * kv_heads, 1, 128), ml_dtypes.bfloat16)
    cache = np.zeros((requests * blocks, kv_heads, 32, 128), ml_dtypes.bfloat16)
    tables = np.random.default_rng(0).permutation(requests * blocks).astype(np.int32)
    lengths = np.full(requests, context, np.int32)
    return q, cache, cache, tables.reshape(requests, blocks), lengths


def medians(*functions: Callable[[], object]) -> list[float]:
    """Milliseconds of each, run in turn."""
    seconds: list[list[float]] = [[] for _ in functions]
    for _ in range(REPEATS):
        for function, taken in zip(functions, seconds, strict=True):
            begin = perf_counter()
            function()
            taken.append(perf_counter() - begin)
    return [1e3 * median(taken) for taken in seconds]


def main() -> None:
    """Print a row for each step."""
    print("requests  context  KV heads   plan of a step   a layer with it   a layer without")
    for shape in STEPS:
        arguments = step_arguments(*shape)
        q, keys, values, *_ = arguments
        plan = DecodePlan.build(*arguments)
        times = medians(
            partial(DecodePlan.build, *arguments),
            partial(prepare_paged_decode, q, keys, values, plan=plan),
            partial(prepare_paged_decode, *arguments),
        )
        print(
            "{:8}  {:7}  {:8}".format(*shape),
            "  {:11.2f} ms  {:13.2f} ms  {:13.2f} ms".format(*times),
        )


if __name__ == "__main__":
    main()
