"""Inputs that defeat a bound of the softmax: the result is right, or falls back to exact."""

import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from segattn.kernels import padded_prefill, prepare_segmented_attention, segmented_attention
from segattn.kernels.launch import execute
from segattn.reference import attention as reference
from segattn.reference.nki import activations
from segattn.reference.nki.strict import Plans
from segattn.tests.kernels.cases import Array, assert_close, garbage, padded_rows, paged_tokens

BF16 = ml_dtypes.bfloat16


def hostile(name: str, q: Array, k: Array, v: Array, k_cache: Array, v_cache: Array) -> None:
    """Change a call in place so that it defeats a bound."""
    query = q[0, 5].astype(float)
    aligned = query / np.linalg.norm(query)
    orthogonal = np.roll(aligned, 1)
    orthogonal -= (orthogonal @ aligned) * aligned
    if name == "norms x8":
        q *= q.dtype.type(8)
        k *= k.dtype.type(8)
        k_cache *= k_cache.dtype.type(8)
    elif name == "aligned outlier in the prior":
        k_cache[3, 0, 2] = (aligned * 400).astype(k.dtype)
    elif name == "orthogonal outlier in the prior":
        k_cache[3, 0, 2] = (orthogonal * 400).astype(k.dtype)
    elif name == "aligned outlier in the chunk":
        k[0, 2] = (aligned * 400).astype(k.dtype)
    elif name == "orthogonal outlier in the chunk":
        k[0, 2] = (orthogonal * 4000).astype(k.dtype)
    elif name == "sums at the edge of the range":
        k[0, 2] = (aligned * 89).astype(k.dtype)
    elif name == "late outlier in the chunk":
        k[0, 120] = (aligned * 4000).astype(k.dtype)
    elif name == "constant scores":
        k[:], k_cache[:] = k[:, :1], k[0, 0]
    elif name == "scores of -1e30":
        q[:], k[:], k_cache[:] = 0, 0, 0
        q[..., 0], k[..., 0], k_cache[..., 0] = -1e30, 8, 8
    elif name == "very negative scores":
        q[:], k[:], k_cache[:] = abs(q), -abs(k), -abs(k_cache)
        q *= q.dtype.type(6)
    elif name == "values of 1e30":
        v *= v.dtype.type(1e30)
        v_cache *= v_cache.dtype.type(1e30)


FLAGGED = {
    "norms x8": True,
    "aligned outlier in the prior": True,
    "orthogonal outlier in the prior": None,
    "aligned outlier in the chunk": None,
    "orthogonal outlier in the chunk": True,
    "sums at the edge of the range": True,
    "late outlier in the chunk": True,
    "constant scores": False,
    "scores of -1e30": True,
    "very negative scores": None,
    "values of 1e30": None,
    "nothing": False,
}
"""Whether the check must fail; None: either is right."""


def flushing_exp(x: Array, out: Array | None = None) -> Array:
    """An exp whose subnormal results are zero, as the hardware's may be."""
    y = np.exp(x, out=out)
    y[np.abs(y) < np.finfo(np.float32).tiny] = 0
    return y


@pytest.fixture
def flushing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's exp flushes denormals to zero."""
    monkeypatch.setitem(activations.ACTIVATIONS, "exp", activations.Activation("exp", flushing_exp))
    # The plans of instructions that ran before hold the other exp.
    monkeypatch.setattr(sys.modules["segattn.reference.nki.isa.activation"], "_plans", Plans())


@pytest.mark.parametrize("name", FLAGGED)
@pytest.mark.parametrize("flushes", [False, True])
def test_hostile_inputs_are_right_or_fall_back(
    name: str, flushes: bool, request: pytest.FixtureRequest
) -> None:
    if flushes:
        request.getfixturevalue("flushing")
    rng = np.random.default_rng(1)
    prior, n = 300, 125
    paged = paged_tokens(rng, [prior], 1, 128, 16, BF16)
    table = np.full(32, -1, np.int32)
    table[:19] = np.arange(19)
    k_cache, v_cache = (
        np.asarray(rng.standard_normal(c.shape), BF16) for c in (paged.k_cache, paged.v_cache)
    )
    q = padded_rows(rng, 2, 128, n, 128, BF16)
    k, v = (padded_rows(rng, 1, 128, n, 128, BF16) for _ in range(2))
    hostile(name, q[:, :n], k[:, :n], v[:, :n], k_cache, v_cache)
    call = (q, k, v, k_cache, v_cache, table, prior, n)
    launch = prepare_segmented_attention(*call)
    results = execute(launch)
    _, flags = results
    is_flagged, out = bool(flags.any()), launch.finish(results)
    expected = reference.segmented_attention(*call)
    assert_close(out, expected)
    row_errors = np.linalg.norm(out[:, :n].astype(float) - expected[:, :n], axis=2)
    row_norms = np.linalg.norm(expected[:, :n], axis=2)
    assert (row_errors <= 0.02 * row_norms).all()
    if FLAGGED[name] is not None:
        assert is_flagged == FLAGGED[name]
    if is_flagged:
        with pytest.raises(FloatingPointError, match=r"softmax='bounded': row sums .* head\(s\)"):
            segmented_attention(*call, softmax="bounded")


@pytest.mark.parametrize("name", FLAGGED)
@pytest.mark.parametrize(
    ("heads", "d", "window", "fp8", "lnc", "softmax"),
    [
        (2, 64, 200, False, 1, "auto"),
        (1, 128, 130, False, 2, "auto"),
        (2, 256, None, False, 1, "auto"),
        (1, 256, 77, False, 2, "exact"),
        (2, 64, 250, True, 1, "auto"),
    ],
)
def test_hostile_inputs_are_right_in_every_other_program(
    name: str,
    heads: int,
    d: int,
    window: int | None,
    fp8: bool,
    lnc: int,
    softmax: str,
    flushing: None,
) -> None:
    """An exp that flushes denormals; outliers in the middle of a block that the window cuts."""
    rng = np.random.default_rng(2)
    prior, n = 307, 125
    q = padded_rows(rng, heads, 128, n, d, BF16)
    k, v = (padded_rows(rng, 1, 128, n, d, BF16) for _ in range(2))
    k_cache, v_cache = rng.standard_normal((2, 21, 1, 16, d)).astype(BF16)
    # The block where hostile() puts its outlier holds positions 208 to 223.
    table = np.full(40, -1, np.int32)
    table[:20] = np.concatenate([np.arange(4, 17), [3], np.arange(14, 20)])
    table[5] = -1
    hostile(name, q[:, :n], k[:, :n], v[:, :n], k_cache, v_cache)
    options: dict[str, Any] = {"sliding_window": window}
    if fp8:
        options |= {"k_scale": 4.0, "v_scale": 3.0}
        k_cache, v_cache = (
            np.clip(c.astype(np.float32) / 4, -240, 240).astype(ml_dtypes.float8_e4m3fn)
            for c in (k_cache, v_cache)
        )
    k_cache[20], v_cache[20] = np.nan, np.nan  # in no table
    call = (q, k, v, k_cache, v_cache, table, prior, n)
    out = segmented_attention(*call, softmax=softmax, lnc=lnc, **options)
    expected = reference.segmented_attention(*call, **options)
    assert_close(out, expected)
    row_errors = np.linalg.norm(out[:, :n].astype(float) - expected[:, :n], axis=2)
    assert (row_errors <= 0.02 * np.linalg.norm(expected[:, :n], axis=2)).all()


def test_a_failed_bounded_prefill_has_written_nothing() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (padded_rows(rng, 1, 128, 128, 64, BF16) for _ in range(3))
    hostile("scores of -1e30", q, k, v, k, v)
    caches = garbage(rng, (9, 1, 16, 64), BF16), garbage(rng, (9, 1, 16, 64), BF16)
    before = [cache.tobytes() for cache in caches]
    with pytest.raises(FloatingPointError, match="softmax='bounded'"):
        padded_prefill(q, k, v, *caches, np.arange(128, dtype=np.int32), 128, softmax="bounded")
    assert [cache.tobytes() for cache in caches] == before
