"""How much slower interpreting is than plain NumPy: two ratios, measured in one run.

`python -m segattn.benchmarks.interpreter` prints them with the limits they must keep. Checks and
trace are on; each side runs with as many BLAS threads as the environment gives, so pin both to
one (OMP_NUM_THREADS=1).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from segattn.kernels import segmented_attention
from segattn.reference import nki
from segattn.reference.nki.trace import Trace

Array = npt.NDArray[Any]
ATTENTION_LIMIT = 4.0
TENSOR_SCALAR_LIMIT = 2.0
S, PRIOR, HEADS, DIM, BLOCK = 512, 2048, 4, 128, 16


def best_of(function: Callable[[], object], repeats: int, rounds: int = 5) -> float:
    """CPU seconds per call in the fastest of `rounds` rounds of `repeats` calls."""
    function()
    times = []
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(repeats):
            function()
        times.append((time.process_time() - start) / repeats)
    return min(times)


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
    return best_of(interpreted, 1, rounds), best_of(
        lambda: numpy_attention(wide, keys, values), 1, rounds
    )


def tensor_scalar_ratio(rounds: int) -> tuple[float, float]:
    """(seconds of tensor_scalar on a [128, 512] fp32 tile, seconds of the NumPy expression)."""
    nl, nisa = nki.language, nki.isa
    seconds: list[float] = []

    @nki.jit
    def kernel(x: Any) -> None:
        tile = nl.load(x)
        out = nl.ndarray(tile.shape, dtype=nl.float32)
        seconds.append(
            best_of(
                lambda: nisa.tensor_scalar(out, tile, nl.multiply, 2.0, op1=nl.add, operand1=1.0),
                100,
                rounds,
            )
        )

    x = np.random.default_rng(0).standard_normal((128, 512)).astype(np.float32)
    with Trace(), nki.strict(subset="off"):  # the timing harness inside is no kernel code
        kernel(x)
    return seconds[0], best_of(lambda: x * 2.0 + 1.0, 100, rounds)


def main(argv: Sequence[str] | None = None) -> int:
    """Print both ratios; exit 1 with --check when one is above its limit."""
    parser = argparse.ArgumentParser(prog="segattn.benchmarks.interpreter", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of which the best counts")
    parser.add_argument("--check", action="store_true", help="fail above the limits")
    args = parser.parse_args(argv)
    worst = 0.0
    for name, measure, limit in (
        (f"attention S={S} prior={PRIOR} heads={HEADS} bf16", attention_ratio, ATTENTION_LIMIT),
        ("tensor_scalar [128, 512] fp32", tensor_scalar_ratio, TENSOR_SCALAR_LIMIT),
    ):
        ours, plain = measure(args.rounds)
        worst = max(worst, ours / plain / limit)
        print(
            f"{name}: interpreter {ours * 1e3:.3f} ms, NumPy {plain * 1e3:.3f} ms, "
            f"ratio {ours / plain:.2f} (limit {limit:g})"
        )
    return 1 if args.check and worst > 1 else 0


if __name__ == "__main__":
    sys.exit(main())
