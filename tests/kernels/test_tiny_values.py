"""Values so small that their products with small weights are flushed to zero."""

import types
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from segattn.kernels import segmented_attention
from segattn.reference import attention as reference
from segattn.reference.nki.isa import matmul
from segattn.tests.kernels.cases import Array, seeds

BF16 = ml_dtypes.bfloat16
TINY = np.finfo(np.float32).tiny


def flushing_matmul(left: Array, right: Array, out: Array | None = None) -> Array:
    """np.matmul whose subnormal products are zero, as those of PE may be."""
    left, right = (np.where(np.abs(x) < TINY, np.float32(0), x) for x in (left, right))
    smallest = [np.abs(x[x != 0]).min(initial=np.inf) for x in (left, right)]
    if smallest[0] * smallest[1] >= TINY:
        return np.matmul(left, right, out=out)
    total = np.zeros((left.shape[0], right.shape[1]), np.float32) if out is None else out
    total[...] = 0
    for column, row in zip(left.T, right, strict=True):
        product = np.multiply.outer(column, row)
        product[np.abs(product) < TINY] = 0
        total += product
    return total


@pytest.fixture
def flushing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's matrix products flush denormals to zero."""
    numpy = types.SimpleNamespace(**{name: getattr(np, name) for name in ("float32", "add", "eye")})
    numpy.matmul = flushing_matmul
    monkeypatch.setattr(matmul, "np", numpy)


def row_errors(out: Array, expected: Array) -> Array:
    """Relative L2 error of each row."""
    difference = np.linalg.norm(out.astype(float) - expected, axis=-1)
    return np.asarray(difference / np.linalg.norm(expected, axis=-1))


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=seeds,
    exponent=st.integers(-31, 0),
    odd_exponent=st.integers(-31, 0),
    lowest=st.sampled_from([-20.0, -10.0, 5.0]),
    v_scale=st.sampled_from([None, 1e-6, 1.0, 1e6]),
    prior=st.sampled_from([0, 300]),
)
def test_no_row_loses_its_products_unnoticed(
    flushing: None,
    seed: int,
    exponent: int,
    odd_exponent: int,
    lowest: float,
    v_scale: float | None,
    prior: int,
) -> None:
    """Every 37th key has values of another magnitude; rows are judged one by one."""
    rng = np.random.default_rng(seed)
    rows, d = 512, 64
    # Against keys of some 1 / sqrt(d), scores of 65 nats in the first 128 rows, less in the others.
    q = 0.1 * rng.standard_normal((1, rows, d))
    q[0, :128] += 65
    q[0, 128:] += rng.uniform(lowest, 10, (rows - 128, 1))
    q = q.astype(BF16)
    k = (0.1 * rng.standard_normal((1, rows, d)) + 1 / np.sqrt(d)).astype(BF16)
    magnitude = np.full((rows, 1), 10.0**exponent)
    magnitude[::37] = 10.0**odd_exponent
    v = (magnitude * rng.standard_normal((1, rows, d))).astype(BF16)
    shape = (20, 1, 16, d)
    k_cache = (0.1 * rng.standard_normal(shape) + 1 / np.sqrt(d)).astype(BF16)
    v_cache = (10.0**exponent * rng.standard_normal(shape)).astype(BF16)
    options: dict[str, Any] = {}
    if v_scale is not None:
        kinds = ml_dtypes.float8_e4m3fn
        k_cache, v_cache = k_cache.astype(kinds), rng.standard_normal(shape).astype(kinds)
        options = {"k_scale": 1.0, "v_scale": v_scale}
    call = (q, k, v, k_cache, v_cache, np.arange(20, dtype=np.int32), prior, rows)
    expected = reference.segmented_attention(*call, **options)
    assert (row_errors(segmented_attention(*call, **options), expected) < 0.03).all()


@pytest.mark.parametrize(
    ("lowest", "size", "is_flagged"),
    [(0.0, 1.0, False), (0.0, 1e-11, True), (62.0, 0.0, False), (62.0, 1e-35, False)],
)
def test_bounded_is_refused_for_tiny_values_under_small_weights_only(
    flushing: None, lowest: float, size: float, is_flagged: bool
) -> None:
    """Scores 65 nats below those of the first rows, or 3; values down to 0 lose nothing then."""
    rng = np.random.default_rng(0)
    q = 0.1 * rng.standard_normal((1, 512, 64))
    q[0, :128] += 65
    q[0, 128:] += lowest
    k = (0.01 * rng.standard_normal((1, 512, 64)) + 1 / 8).astype(BF16)
    v = (size * rng.standard_normal((1, 512, 64))).astype(BF16)
    cache = np.zeros((1, 1, 16, 64), BF16)
    call = (q.astype(BF16), k, v, cache, cache, np.zeros(1, np.int32), 0, 512)
    if is_flagged:
        with pytest.raises(FloatingPointError, match="accurate range"):
            segmented_attention(*call, softmax="bounded")
        return
    expected = reference.segmented_attention(*call)
    out = segmented_attention(*call, softmax="bounded")
    assert (
        np.linalg.norm(out - expected, axis=-1) <= 0.03 * np.linalg.norm(expected, axis=-1)
    ).all()
