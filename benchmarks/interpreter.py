"""How much slower interpreting is than plain NumPy, measured in one run.

Printed is the ratio of an attention call and of much used
instructions, the first three with the limits they must keep. Checks and
trace are on; both sides run BLAS on one thread, unless OMP_NUM_THREADS says more.
"""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from itertools import zip_longest
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from segattn.kernels import segmented_attention
from segattn.reference import nki
from segattn.reference.nki.trace import Trace
from segattn.reference.terminal import columns, table

Array = npt.NDArray[Any]
ATTENTION_LIMIT = 4.0
TENSOR_SCALAR_LIMIT = 2.0
S, PRIOR, HEADS, DIM, BLOCK = 512, 2048, 4, 128, 16


def best_of_both(
    first: Callable[[], object], second: Callable[[], object], repeats: int, rounds: int
) -> tuple[float, float]:
    """CPU seconds per call of each in its fastest of `rounds` rounds of `repeats` calls.

    They take turns, so that a slow spell of the machine meets both.
    """
    times: tuple[list[float], list[float]] = ([], [])
    for function in (first, second):
        function()
    for _ in range(rounds):
        for function, seconds in zip((first, second), times, strict=True):
            start = time.process_time()
            for _ in range(repeats):
                function()
            seconds.append((time.process_time() - start) / repeats)
    return min(times[0]), min(times[1])


def numpy_attention(q: Array, k: Array, v: Array) -> Array:
    """Causal attention of q [H, S, d] on k, v [prior + S, d], all in float32."""
    scores = (q @ k.T) * np.float32(q.shape[-1] ** -0.5)
    rows = np.arange(q.shape[1])[:, None] + len(k) - q.shape[1]
    scores = np.where(np.arange(len(k)) <= rows, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    result: Array = (weights @ v) / weights.sum(axis=-1, keepdims=True)
    return result


def attention_ratio(rounds: int) -> tuple[float, float]:
    """(seconds of one segmented_attention call, seconds of the same attention in NumPy)."""
    rng = np.random.default_rng(0)
    num_blocks = PRIOR // BLOCK
    q = rng.standard_normal((HEADS, S, DIM)).astype(ml_dtypes.bfloat16)
    k, v = (rng.standard_normal((1, S, DIM)).astype(ml_dtypes.bfloat16) for _ in range(2))
    caches = [
        rng.standard_normal((num_blocks, 1, BLOCK, DIM)).astype(ml_dtypes.bfloat16)
        for _ in range(2)
    ]
    table = rng.permutation(num_blocks).astype(np.int32)

    def interpreted() -> object:
        with Trace():
            return segmented_attention(q, k, v, caches[0], caches[1], table, PRIOR, S)

    keys, values = (
        np.concatenate([c[table].reshape(-1, DIM), new[0]]).astype(np.float32)
        for c, new in zip(caches, (k, v), strict=True)
    )
    wide = q.astype(np.float32)
    return best_of_both(interpreted, lambda: numpy_attention(wide, keys, values), 1, rounds)


class Comparison(NamedTuple):
    """Seconds of an instruction and of the NumPy expression for the same values."""

    name: str
    interpreted: float
    numpy: float


def instruction_costs(rounds: int) -> list[Comparison]:
    """The instructions that kernels use most, on [128, 512] tiles, against NumPy in float32.

    The first two are `tensor_scalar` with one and with two operators.
    """
    nl, nisa = nki.language, nki.isa
    found: list[Comparison] = []
    wide = np.random.default_rng(0).uniform(0.5, 1.0, (128, 512)).astype(np.float32)
    square = wide[:, :128].copy()
    column = np.ones((128, 1), np.float32)

    @nki.jit
    def kernel(x: Any) -> None:
        tile, out, half = nl.load(x), *_tiles((128, 512), nl.float32, nl.bfloat16)
        left, turned = nl.load(x[:, 0:128]), nl.ndarray((128, 128), nl.float32, nl.psum)
        psum = nl.ndarray((128, 512), nl.float32, nl.psum)
        sums, ones = _tiles((128, 1), nl.float32, nl.float32)
        nisa.memset(ones, 1.0)
        hbm = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.private_hbm)
        pairs: list[tuple[str, Callable[[], object], Callable[[], object]]] = [
            (
                "tensor_scalar, one operator",
                lambda: nisa.tensor_scalar(out, tile, nl.multiply, 2.0),
                lambda: wide * 2.0,
            ),
            (
                "tensor_scalar, two operators",
                lambda: nisa.tensor_scalar(out, tile, nl.multiply, 2.0, op1=nl.add, operand1=1.0),
                lambda: wide * 2.0 + 1.0,
            ),
            (
                "tensor_scalar, column operand",
                lambda: nisa.tensor_scalar(out, tile, nl.multiply, ones),
                lambda: wide * column,
            ),
            (
                "tensor_tensor",
                lambda: nisa.tensor_tensor(out, tile, tile, nl.add),
                lambda: wide + wide,
            ),
            (
                "tensor_copy to bfloat16",
                lambda: nisa.tensor_copy(half, tile),
                lambda: wide.astype(ml_dtypes.bfloat16),
            ),
            (
                "activation exp with row sums",
                lambda: nisa.activation_reduce(out, nl.exp, tile, nl.add, sums),
                lambda: np.exp(wide).sum(axis=1),
            ),
            (
                "tensor_reduce maximum",
                lambda: nisa.tensor_reduce(sums, nl.maximum, tile, axis=1),
                lambda: wide.max(axis=1),
            ),
            (
                "nc_matmul",
                lambda: nisa.nc_matmul(psum, left, tile, accumulate=False),
                lambda: square.T @ wide,
            ),
            ("nc_transpose", lambda: nisa.nc_transpose(turned, left), lambda: square.T.copy()),
            ("dma_copy from HBM", lambda: nisa.dma_copy(out, x), lambda: wide.copy()),
            ("dma_copy to HBM", lambda: nisa.dma_copy(hbm, tile), lambda: wide.copy()),
        ]
        for name, interpreted, plain in pairs:
            found.append(Comparison(name, *best_of_both(interpreted, plain, 100, rounds)))

    with Trace(), nki.strict(purity="off"):  # the timing harness inside is no kernel code
        kernel(wide)
    return found


def _tiles(shape: tuple[int, ...], *dtypes: str) -> list[Any]:
    return [nki.language.ndarray(shape, dtype=dtype) for dtype in dtypes]


def add_arguments(parser: ArgumentParser) -> None:
    """How long to measure, and whether to judge."""
    parser.add_argument("--rounds", type=int, default=7, help="rounds of which the best counts (7)")
    parser.add_argument("--check", action="store_true", help="fail above the limits")


def run(options: Namespace) -> int:
    """Print the ratios; 1 with --check when one is above its limit."""
    if options.rounds < 1:
        options.parser.error(f"--rounds={options.rounds}: must be at least 1")
    attention = Comparison(
        f"attention S={S} prior={PRIOR} heads={HEADS} bf16", *attention_ratio(options.rounds)
    )
    measured = [attention, *instruction_costs(options.rounds)]
    limits = [ATTENTION_LIMIT, TENSOR_SCALAR_LIMIT, TENSOR_SCALAR_LIMIT]
    rows = [
        {
            "name": one.name,
            "interpreted_ms": 1e3 * one.interpreted,
            "numpy_ms": 1e3 * one.numpy,
            "ratio": one.interpreted / one.numpy,
            "limit": limit,
        }
        for one, limit in zip_longest(measured, limits)
    ]
    if options.json:
        print(json.dumps(rows))
    else:
        heads = columns("what", ">interpreter ms", ">NumPy ms", ">ratio", ">limit")
        cells = [
            [row["name"], *(f"{row[k]:.3f}" for k in ("interpreted_ms", "numpy_ms", "ratio"))]
            + [row["limit"] or ""]
            for row in rows
        ]
        print(table("CPU time, measured", heads, cells))
    above = any(r.interpreted > limit * r.numpy for r, limit in zip(measured, limits, strict=False))
    return int(options.check and above)
