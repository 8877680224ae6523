"""nc_matmul and nc_transpose: values, accumulation groups, limits."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from segattn.reference import nki
from segattn.reference.nki.errors import NkiValidationError
from segattn.tests.nki.matmuls import matmul, product
from segattn.tests.nki.running import floats, run

nl, nisa = nki.language, nki.isa
BF16, FP8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (np.float32, np.float32),
        (BF16, BF16),
        (np.float16, BF16),
        (FP8, ml_dtypes.float8_e5m2),
        (FP8, BF16),
    ],
)
def test_products_of_every_dtype_pair_are_summed_in_fp32(left: Any, right: Any) -> None:
    a, b = floats(96, 64, dtype=left), floats(96, 200, seed=1, dtype=right)
    np.testing.assert_allclose(matmul(a, b), product(a, b), rtol=1e-5, atol=1e-4)


def test_operands_with_several_free_dimensions_are_flattened() -> None:
    a, b = floats(32, 4, 8), floats(32, 2, 3, 5, seed=1)
    got = matmul(a, b, shape=(32, 30))
    np.testing.assert_allclose(
        got, product(a.reshape(32, 32), b.reshape(32, 30)), rtol=1e-5, atol=1e-5
    )


def test_double_row_contracts_over_the_first_free_dimension_too() -> None:
    a, b = floats(128, 2, 16, dtype=FP8), floats(128, 2, 24, seed=1, dtype=FP8)
    got = matmul(a, b, perf_mode=nisa.matmul_perf_mode.double_row)
    expected = sum(product(a[:, j], b[:, j]) for j in range(2))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("accumulate", "expected"),
    [
        ((False, True), 3.0),  # one group
        ((False, False), 2.0),  # the second overwrites
        ((None, None), 3.0),  # first write overwrites, later ones add
        ((False, None), 3.0),
    ],
)
def test_accumulate_decides_between_overwriting_and_adding(
    accumulate: tuple[Any, Any], expected: float
) -> None:
    one, two = np.ones((1, 2), np.float32), np.full((1, 4), 2, np.float32)

    def body(dst: Any, s: Any, first: Any, second: Any) -> None:
        nisa.nc_matmul(dst, s, first, accumulate=accumulate[0])
        nisa.nc_matmul(dst, s, second, accumulate=accumulate[1])

    got = run(body, one, np.ones((1, 4), np.float32), two, out=((2, 4), "float32"), psum=True)
    np.testing.assert_array_equal(got, np.full((2, 4), expected))


def test_none_adds_only_where_an_earlier_matmul_wrote() -> None:
    one, row = np.ones((1, 2), np.float32), np.ones((1, 6), np.float32)

    def body(dst: Any, s: Any, m: Any) -> None:
        nisa.nc_matmul(dst[:, 0:4], s, m[:, 0:4])
        nisa.nc_matmul(dst[:, 2:6], s, m[:, 2:6])
        nisa.nc_matmul(dst, s, m)

    got = run(body, one, row, out=((2, 6), "float32"), psum=True)
    np.testing.assert_array_equal(got[0], [2, 2, 3, 3, 2, 2])


@pytest.mark.parametrize("accumulate", [True, None])
@nki.strict(accumulate_none="off")
def test_adding_to_psum_that_memset_wrote_is_undefined_and_none_overwrites(
    accumulate: Any,
) -> None:
    one, row = np.ones((1, 2), np.float32), np.ones((1, 4), np.float32)

    def body(dst: Any, s: Any, m: Any) -> None:
        nisa.memset(dst, 5.0)
        nisa.nc_matmul(dst, s, m, accumulate=accumulate)

    if accumulate is None:
        np.testing.assert_array_equal(
            run(body, one, row, out=((2, 4), "float32"), psum=True), np.ones((2, 4))
        )
    else:
        with pytest.raises(NkiValidationError, match=r"accumulate=True .* not written by an earl"):
            run(body, one, row, out=((2, 4), "float32"), psum=True)


@nki.strict(accumulate_none="off")
def test_a_memset_or_copy_into_a_group_ends_it() -> None:
    one, row = np.ones((1, 2), np.float32), np.ones((1, 4), np.float32)

    def body(dst: Any, s: Any, m: Any) -> None:
        nisa.nc_matmul(dst, s, m)
        nisa.memset(dst[:, 0:2], 7.0)
        nisa.nc_matmul(dst, s, m)

    got = run(body, one, row, out=((2, 4), "float32"), psum=True)
    np.testing.assert_array_equal(got[0], [1, 1, 2, 2])


def test_accumulating_on_a_fresh_tile_is_undefined() -> None:
    one, row = np.ones((1, 2), np.float32), np.ones((1, 4), np.float32)

    def body(dst: Any, s: Any, m: Any) -> None:
        nisa.nc_matmul(dst[:, 0:2], s, m[:, 0:2])
        nisa.nc_matmul(dst, s, m, accumulate=True)

    with pytest.raises(NkiValidationError, match="part of it was not written by an earlier"):
        run(body, one, row, out=((2, 4), "float32"), psum=True)


def test_a_second_tile_at_the_same_bank_starts_a_new_group() -> None:
    one, row = np.ones((1, 2), np.float32), np.ones((1, 4), np.float32)

    def body(dst: Any, s: Any, m: Any) -> None:
        for _ in range(2):
            bank = nl.ndarray((2, 4), nl.float32, nl.psum, address=(0, 2048))
            nisa.nc_matmul(bank, s, m)
            nisa.nc_matmul(bank, s, m)
        nisa.tensor_copy(dst, bank)

    np.testing.assert_array_equal(
        run(body, one, row, out=((2, 4), "float32")), np.full((2, 4), 2.0)
    )


@pytest.mark.parametrize("dtype", [BF16, np.float32, np.int32, np.uint8])
def test_transpose_mode_moves_bits(dtype: Any) -> None:
    a = np.arange(64 * 32).reshape(64, 32).astype(dtype)
    identity = np.eye(64, dtype=dtype)
    got = matmul(a, identity, is_transpose=True, shape=(32, 64), dtype=np.dtype(dtype).name)
    np.testing.assert_array_equal(got, a.T)


@pytest.mark.parametrize("by_matmul", [True, False])
def test_the_tensor_engine_transposes_no_fp8(by_matmul: bool) -> None:
    eye = np.eye(8).astype(ml_dtypes.float8_e4m3)

    def body(dst: Any, x: Any) -> None:
        if by_matmul:
            nisa.nc_matmul(dst, x, x, is_transpose=True)
        else:
            nisa.nc_transpose(dst, x)

    with pytest.raises(NkiValidationError, match=r"float8_e4m3; a transpose .* cast to bfloat16"):
        run(body, eye, out=((8, 8), "float8_e4m3"), psum=True)


@pytest.mark.parametrize("moving", [np.ones((8, 8)), np.eye(8, 6), np.eye(8)[::-1]])
def test_transpose_mode_needs_an_identity(moving: Any) -> None:
    with pytest.raises(NkiValidationError, match="that is no identity matrix"):
        matmul(
            floats(8, 4), moving.astype(np.float32), is_transpose=True, shape=(4, moving.shape[1])
        )


def test_transposing_nan_and_infinity_is_bit_exact() -> None:
    a = floats(16, 8, dtype=BF16)
    a[3, 2], a[4, 5] = np.nan, -np.inf
    got = run(lambda dst, x: nisa.nc_transpose(dst, x), a, out=((8, 16), "bfloat16"), psum=True)
    np.testing.assert_array_equal(got.view(np.uint16), a.T.view(np.uint16))


def test_nc_transpose_flattens_free_dimensions_and_runs_on_the_vector_engine_up_to_32() -> None:
    a = floats(32, 4, 8)
    got = run(
        lambda dst, x: nisa.nc_transpose(dst, x, engine=nisa.engine.vector),
        a,
        out=((32, 32), "float32"),
    )
    np.testing.assert_array_equal(got, a.reshape(32, 32).T)
    with pytest.raises(NkiValidationError, match=r"\[32, 33\]; limit \[32, 32\] on the vector"):
        run(lambda dst, x: nisa.nc_transpose(dst, x), floats(32, 33), out=((33, 32), "float32"))
