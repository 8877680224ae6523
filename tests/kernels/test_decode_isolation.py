"""What one request of a decode call holds never reaches the rows of another."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from segattn.kernels import paged_decode
from segattn.reference import attention
from segattn.reference.nki.trace import Trace
from segattn.tests.kernels.cases import normal

LENGTHS = np.array([300, 500, 40, 200], np.int32)
SICK = 1
"""The request that gets the bad number: longer than a slot's share of the others."""


def _step(seed: int) -> dict[str, Any]:
    """Four requests of 8 query heads on 2 KV heads, in 16 blocks of 32 tokens each."""
    rng = np.random.default_rng(seed)
    tables = rng.permutation(4 * 16).astype(np.int32).reshape(4, 16)
    return {
        "q": normal(rng, (4, 8, 2, 64), np.float32),
        "k_cache": normal(rng, (64, 2, 32, 64), np.float32),
        "v_cache": normal(rng, (64, 2, 32, 64), np.float32),
        "block_tables": tables,
        "context_lens": LENGTHS,
    }


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, 1e37, -1e38, 1e38, 3e38])
@pytest.mark.parametrize("where", ["q", "k_cache", "v_cache", "edge of k", "edge of v"])
@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy tells of inf - inf
def test_a_bad_number_stays_in_its_request(where: str, number: float, lnc: int) -> None:
    step = _step(3)
    expected = attention.paged_decode(**step)
    name = {"edge of k": "k_cache", "edge of v": "v_cache"}.get(where, where)
    position = 499 if where.startswith("edge") else 70
    block = step["block_tables"][SICK, position // 32]
    at = (SICK, 3, 0, 5) if name == "q" else (block, 0, position % 32, 5)
    step[name][at] = number
    out = np.asarray(paged_decode(**step, lnc=lnc))
    for request in (0, 2, 3):
        np.testing.assert_allclose(out[request], expected[request], rtol=0.02, atol=0.02)
    if not np.isfinite(number):
        assert not np.isfinite(out[SICK]).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_several_bad_requests_keep_their_own_results() -> None:
    step = _step(4)
    expected = attention.paged_decode(**step)
    step["q"][0, 0, 0, 0] = np.nan
    step["v_cache"][step["block_tables"][3, 0], 1, 0, 0] = np.inf
    out = np.asarray(paged_decode(**step, softmax="exact"))
    np.testing.assert_allclose(out[1:3], expected[1:3], rtol=0.02, atol=0.02)
    assert not np.isfinite(out[0, 0, 0]).any()
    assert not np.isfinite(out[3, 4:, :, 0]).any()


def test_a_finite_step_is_launched_once() -> None:
    step = _step(5)
    for name in ("q", "k_cache", "v_cache"):
        step[name] = step[name].astype(ml_dtypes.bfloat16)
    with Trace() as trace:
        paged_decode(**step)
    assert len(trace.launches) == 1
