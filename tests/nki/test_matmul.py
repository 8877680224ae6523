"""nc_matmul and nc_transpose: values, accumulation groups, limits."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from segattn.reference import nki
from segattn.reference.nki.errors import NkiValidationError
from segattn.tests.nki.running import floats, run

nl, nisa = nki.language, nki.isa
BF16, FP8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3


def _product(a: Any, b: Any) -> Any:
    return a.astype(np.float64).T @ b.astype(np.float64)


def _matmul(a: Any, b: Any, **options: Any) -> Any:
    """The result of one nc_matmul on a fresh PSUM tile."""
    shape = options.pop("shape", (a.shape[-1], b.shape[-1]))
    dtype = options.pop("dtype", nl.float32)
    return run(
        lambda dst, s, m: nisa.nc_matmul(dst, s, m, **options),
        a,
        b,
        out=(shape, dtype),
        psum=True,
    )


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
    np.testing.assert_allclose(_matmul(a, b), _product(a, b), rtol=1e-5, atol=1e-4)


def test_operands_with_several_free_dimensions_are_flattened() -> None:
    a, b = floats(32, 4, 8), floats(32, 2, 3, 5, seed=1)
    got = _matmul(a, b, shape=(32, 30))
    np.testing.assert_allclose(
        got, _product(a.reshape(32, 32), b.reshape(32, 30)), rtol=1e-5, atol=1e-5
    )


def test_double_row_contracts_over_the_first_free_dimension_too() -> None:
    a, b = floats(128, 2, 16, dtype=FP8), floats(128, 2, 24, seed=1, dtype=FP8)
    got = _matmul(a, b, perf_mode=nisa.matmul_perf_mode.double_row)
    expected = sum(_product(a[:, j], b[:, j]) for j in range(2))
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
    got = _matmul(a, identity, is_transpose=True, shape=(32, 64), dtype=np.dtype(dtype).name)
    np.testing.assert_array_equal(got, a.T)


@pytest.mark.parametrize("moving", [np.ones((8, 8)), np.eye(8, 6), np.eye(8)[::-1]])
def test_transpose_mode_needs_an_identity(moving: Any) -> None:
    with pytest.raises(NkiValidationError, match="that is no identity matrix"):
        _matmul(
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


_TILE = {"tile_position": (64, 0), "tile_size": (64, 128)}


@pytest.mark.parametrize(
    ("a", "b", "options", "text"),
    [
        (
            (64, 129),
            (64, 8),
            {"shape": (128, 8)},
            "stationary has 129 elements per partition .* limit 128",
        ),
        ((64, 8), (64, 513), {}, "moving has 513 elements per partition .* limit 512"),
        ((64, 8), (63, 8), {}, "stationary has 64 partitions, moving 63"),
        ((64, 8), (64, 8), {"shape": (8, 9)}, r"dst has shape \(8, 9\); needed \[8, 8\]"),
        ((64, 8), (64, 8), {"dtype": nl.bfloat16}, "allowed on trn2: float32"),
        ((65, 8), (65, 8), _TILE, r"65 partitions \(K\); limit 64"),
        ((64, 8), (64, 8), {**_TILE, "tile_position": (32, 0)}, "row 32; allowed: multiples of 64"),
        ((64, 8), (64, 8), {"tile_size": (64, 64)}, "must both be given"),
        ((64, 8), (64, 8), {**_TILE, "tile_size": (48, 128)}, "row 48; allowed: 32, 64, 128"),
        (
            (64, 2, 8),
            (64, 2, 8),
            {"perf_mode": nisa.matmul_perf_mode.double_row, "shape": (8, 8)},
            "dtype float32; double_row takes",
        ),
    ],
)
def test_a_matmul_outside_the_limits_names_operand_value_and_limit(
    a: Any, b: Any, options: Any, text: str
) -> None:
    with pytest.raises(NkiValidationError, match=rf"nisa.nc_matmul: .*{text}"):
        _matmul(floats(*a), floats(*b), **options)


def test_row_tiles_of_the_array_are_accepted() -> None:
    a, b = floats(64, 8), floats(64, 16, seed=1)
    np.testing.assert_allclose(_matmul(a, b, **_TILE), _product(a, b), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "columns", "position", "text"),
    [
        ((64, 64), (32, 32), (64, 32), ""),
        ((64, 0), (32, 32), (64, 32), "row 64 with operand moving 'm' at partition 0"),
        ((0, 64), (32, 32), (64, 32), "row 64 with operand stationary 's' at partition 0"),
        ((64, 64), (0, 0), (64, 32), "column 32 with operand dst 'd' at partition 0"),
        ((0, 0), (96, 96), (0, 96), ""),
        ((0, 0), (96, 96), (0, 0), "column 0 with operand dst 'd' at partition 96"),
    ],
)
def test_a_tile_of_the_array_takes_the_partitions_of_its_rows_and_columns(
    rows: tuple[int, int], columns: tuple[int, int], position: tuple[int, int], text: str
) -> None:
    @nki.jit
    def kernel(a: Any, b: Any) -> Any:
        s = nl.ndarray((128, 8), dtype=nl.float32)
        m = nl.ndarray((128, 16), dtype=nl.float32)
        d = nl.ndarray((128, 16), dtype=nl.float32, buffer=nl.psum)
        left, right = s[nl.ds(rows[0], 32)], m[nl.ds(rows[1], 32)]
        nisa.dma_copy(left, a)
        nisa.dma_copy(right, b)
        dst = d[nl.ds(columns[0], 8)]
        nisa.nc_matmul(dst, left, right, tile_position=position, tile_size=(32, 32))
        out = nl.ndarray((8, 16), dtype=nl.float32)
        nisa.tensor_copy(out, dst)
        result = nl.ndarray((8, 16), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(result, out)
        return result

    a, b = floats(32, 8), floats(32, 16, seed=1)
    if text:
        with pytest.raises(NkiValidationError, match=f"tile_position {text}.*start_partition"):
            kernel(a, b)
    with nki.strict(start_partition="off" if text else "error"):
        np.testing.assert_allclose(kernel(a, b), _product(a, b), rtol=1e-5, atol=1e-5)


def test_the_position_of_a_tile_with_an_address_is_known() -> None:
    @nki.jit
    def kernel(first: int) -> None:
        left = nl.ndarray((64, 8), dtype=nl.float32, address=(first, 0))
        right = nl.ndarray((64, 8), dtype=nl.float32, address=(first, 64))
        nisa.memset(left, 1.0)
        nisa.memset(right, 1.0)
        out = nl.ndarray((8, 8), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(out, left, right, tile_position=(64, 0), tile_size=(64, 128))

    kernel(64)
    with pytest.raises(NkiValidationError, match=r"tile_position row 64 .* at partition 0"):
        kernel(0)


def test_mixed_fp32_and_bf16_operands_are_refused() -> None:
    with pytest.raises(NkiValidationError, match="float32/tfloat32 only goes with"):
        _matmul(floats(8, 8), floats(8, 8, dtype=BF16))


@pytest.mark.parametrize("dtype", [np.int32, ml_dtypes.float8_e4m3fn])
def test_operand_dtypes_that_the_engine_lacks_are_refused(dtype: Any) -> None:
    with pytest.raises(NkiValidationError, match=f"dtype {np.dtype(dtype).name}; allowed: bfl"):
        _matmul(np.ones((8, 8), dtype), np.ones((8, 8), dtype))


def test_a_matmul_reads_sbuf_and_writes_psum() -> None:
    @nki.jit
    def kernel(a: Any, into: Any, source: Any) -> None:
        tile = nl.load(a)
        other = nl.zeros(a.shape, dtype=nl.float32, buffer=source)
        nisa.nc_matmul(nl.ndarray((8, 8), nl.float32, into), tile, other)

    kernel(floats(8, 8), nl.psum, nl.sbuf)
    for into, source, text in (
        (nl.sbuf, nl.sbuf, "operand dst .* is in sbuf; allowed: psum"),
        (nl.psum, nl.psum, "operand moving .* is in psum; allowed: sbuf"),
    ):
        with pytest.raises(NkiValidationError, match=text):
            kernel(floats(8, 8), into, source)


def test_a_matmul_result_stays_in_one_bank() -> None:
    @nki.jit
    def kernel(a: Any, b: Any, first: Any) -> None:
        tile = nl.ndarray((8, 1024), nl.float32, nl.psum)
        nisa.nc_matmul(tile[:, nl.ds(first, 256)], nl.load(a), nl.load(b))

    a, b = floats(8, 8), floats(8, 256)
    kernel(a, b, 256)
    kernel(a, b, 512)
    with pytest.raises(NkiValidationError, match=r"spans bytes 1540..2563 .* one bank of 2048"):
        kernel(a, b, 385)


@pytest.mark.parametrize("by_matmul", [True, False])
def test_a_transpose_of_the_tensor_engine_stays_in_one_bank(by_matmul: bool) -> None:
    @nki.jit
    def kernel(a: Any, first: int, by_matmul: bool) -> None:
        tile = nl.ndarray((8, 1024), nl.float32, nl.psum)
        data, dst = nl.load(a), tile[:, nl.ds(first, 128)]
        if by_matmul:
            identity = nl.shared_identity_matrix(128, dtype=nl.float32)
            nisa.nc_matmul(dst, data, identity, is_transpose=True)
        else:
            nisa.nc_transpose(dst, data)

    kernel(floats(128, 8), 384, by_matmul)
    with pytest.raises(NkiValidationError, match=r"spans bytes 1600..2111 .* one bank of 2048"):
        kernel(floats(128, 8), 400, by_matmul)
