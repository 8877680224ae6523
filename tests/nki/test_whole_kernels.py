"""Small kernels, run end to end and compared with NumPy formulas."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from segattn.reference import nki
from segattn.reference.nki.errors import NkiValidationError, OutOfBoundsError

nl, nisa = nki.language, nki.isa
rng = np.random.default_rng(0)


@nki.jit
def matmul_kernel(lhsT: Any, rhs: Any) -> Any:
    """2 * lhsT.T @ rhs, contraction in tiles of 128."""
    K, M = lhsT.shape
    N = rhs.shape[1]
    out = nl.ndarray((M, N), dtype=nl.float32, buffer=nl.shared_hbm)
    total = nl.ndarray((M, N), dtype=nl.float32, buffer=nl.psum)
    for k in range(K // 128):
        left = nl.ndarray((128, M), dtype=lhsT.dtype)
        right = nl.ndarray((128, N), dtype=rhs.dtype)
        nisa.dma_copy(dst=left, src=lhsT[k * 128 : (k + 1) * 128, :])
        nisa.dma_copy(dst=right, src=rhs[k * 128 : (k + 1) * 128, :])
        nisa.nc_matmul(total, left, right, accumulate=k > 0)
    result = nl.ndarray((M, N), dtype=nl.float32)
    nisa.activation(result, nl.copy, total, scale=2.0)
    nisa.dma_copy(out, result)
    return out


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_tiled_matmul_agrees_with_numpy_in_fp32(dtype: Any) -> None:
    a = rng.standard_normal((256, 128)).astype(dtype)
    b = rng.standard_normal((256, 512)).astype(dtype)
    expected = 2 * a.astype(np.float64).T @ b.astype(np.float64)
    np.testing.assert_allclose(matmul_kernel(a, b), expected, rtol=1e-4, atol=1e-4)


@nki.jit
def gathered_softmax_kernel(table: Any, rows: Any, repeats: Any) -> Any:
    """Gather rows (-1 = zeros), double-and-add-one `repeats` times, causal softmax weights."""
    num, width = rows.shape[0], table.shape[1]
    out = nl.ndarray((num, width), dtype=nl.float32, buffer=nl.shared_hbm)
    index = nl.load(rows)
    tile = nl.zeros((num, width), dtype=nl.float32)
    pattern = [[width, num], [1, width]]
    nisa.dma_copy(
        tile,
        table.ap(pattern, vector_offset=index, indirect_dim=0),
        oob_mode=nisa.oob_mode.skip,
    )
    count = nisa.register_alloc()
    nisa.register_load(count, nl.load(repeats))

    def body(i: Any) -> None:
        nisa.tensor_scalar(tile, tile, nl.multiply, 2.0, op1=nl.add, operand1=1.0)

    nl.fori_loop(0, count, body)
    largest = nl.ndarray((num, 1), dtype=nl.float32)
    nisa.tensor_reduce(largest, nl.maximum, tile, axis=1, negate=True)
    weights = nl.ndarray((num, width), dtype=nl.bfloat16)
    total = nl.ndarray((num, 1), dtype=nl.float32)
    nisa.activation_reduce(weights, nl.exp, tile, nl.add, total, bias=largest)
    nisa.reciprocal(total, total)
    nisa.tensor_scalar(tile, weights, nl.multiply, total)
    nisa.affine_select(tile, [[1, width]], -1, tile, 0.0, nl.less_equal)
    nisa.dma_copy(out, tile)
    return out


def test_gather_with_skip_and_a_run_time_loop_agree_with_numpy() -> None:
    table = rng.standard_normal((40, 64)).astype(np.float32)
    rows = rng.integers(-1, 40, (128, 1)).astype(np.int32)
    x = np.where(rows >= 0, table[np.maximum(rows[:, 0], 0)], 0)
    for _ in range(3):
        x = x * 2 + 1
    e = np.exp(x - x.max(axis=1, keepdims=True))
    expected = e / e.sum(axis=1, keepdims=True) * np.tril(np.ones((128, 64)))
    got = gathered_softmax_kernel(table, rows, np.array([[3]], np.int32))
    # weights pass through bfloat16: relative error up to 2**-9
    np.testing.assert_allclose(got, expected, rtol=2**-8, atol=1e-7)


def test_a_gathered_row_out_of_bounds_is_an_error_that_names_row_and_index() -> None:
    @nki.jit
    def kernel(table: Any, rows: Any) -> None:
        tile = nl.ndarray((rows.shape[0], table.shape[1]), dtype=table.dtype)
        pattern = [[table.shape[1], rows.shape[0]], [1, table.shape[1]]]
        nisa.dma_copy(tile, table.ap(pattern, vector_offset=nl.load(rows), indirect_dim=0))

    table = np.zeros((4, 8), np.float32)
    kernel(table, np.array([[0], [3]], np.int32))
    with pytest.raises(OutOfBoundsError, match=r"row index 4 \(row 1 of 2\)"):
        kernel(table, np.array([[0], [4]], np.int32))


def test_an_input_array_is_written_in_place_and_returned() -> None:
    @nki.jit
    def kernel(cache: Any) -> Any:
        tile = nl.full((2, 4), 7.0, dtype=nl.float32)
        nisa.dma_copy(cache[1:3], tile)
        return cache

    cache = np.zeros((5, 4), np.float32)
    assert kernel(cache) is cache
    np.testing.assert_array_equal(cache[:, 0], [0, 7, 7, 0, 0])


def test_an_instruction_outside_a_kernel_is_refused() -> None:
    with pytest.raises(NkiValidationError, match="inside a kernel"):
        nl.ndarray((128, 4), dtype=nl.float32)
