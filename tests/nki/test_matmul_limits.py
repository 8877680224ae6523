"""nc_matmul and nc_transpose: what the array takes, tiles of it, banks."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from segattn.reference import nki
from segattn.reference.nki.errors import NkiValidationError
from segattn.tests.nki.matmuls import matmul, product
from segattn.tests.nki.running import floats

nl, nisa = nki.language, nki.isa
BF16, FP8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3


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
@nki.strict(psum_bank="off")
def test_a_matmul_outside_the_limits_names_operand_value_and_limit(
    a: Any, b: Any, options: Any, text: str
) -> None:
    with pytest.raises(NkiValidationError, match=rf"nisa.nc_matmul: .*{text}"):
        matmul(floats(*a), floats(*b), **options)


def test_row_tiles_of_the_array_are_accepted() -> None:
    a, b = floats(64, 8), floats(64, 16, seed=1)
    np.testing.assert_allclose(matmul(a, b, **_TILE), product(a, b), rtol=1e-5, atol=1e-5)


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
@nki.strict(operand_partitions="off")
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
        np.testing.assert_allclose(kernel(a, b), product(a, b), rtol=1e-5, atol=1e-5)


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
        matmul(floats(8, 8), floats(8, 8, dtype=BF16))


@pytest.mark.parametrize("dtype", [np.int32, ml_dtypes.float8_e4m3fn])
def test_operand_dtypes_that_the_engine_lacks_are_refused(dtype: Any) -> None:
    with pytest.raises(NkiValidationError, match=f"dtype {np.dtype(dtype).name}; allowed: bfl"):
        matmul(np.ones((8, 8), dtype), np.ones((8, 8), dtype))


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


@nki.strict(psum_bank="off")
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
@nki.strict(psum_bank="off")
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
