"""Cases of the rules on compute instructions, of those that documents state as well."""

from typing import Any

import numpy as np

from segattn.reference import nki
from segattn.tests.nki.field_rule_cases import BF16, case, ones, psum, sbuf, stored

nl, nisa = nki.language, nki.isa


@case(
    "operand_partitions",
    r"inputs in SBUF start at different partitions \('\w+' at 0, '\w+' at 32\)",
    ones(64, 8),
)
def inputs_of_two_quadrants(x: Any, bad: bool) -> Any:
    tile = nl.load(x)
    result = sbuf(32, 8)
    other = tile[32:64]
    if not bad:
        other = sbuf(32, 8)
        nisa.tensor_copy(other, tile[32:64])
    nisa.tensor_tensor(result, tile[0:32], other, nl.add)
    return stored(result)


@case("operand_partitions", r"nc_matmul: .* different partitions", ones(64, 8, dtype=BF16))
def matmul_of_two_quadrants(x: Any, bad: bool) -> Any:
    tile, product, start = nl.load(x), psum(8, 8), 32 if bad else 0
    nisa.nc_matmul(product, tile[0:32], tile[start : start + 32], accumulate=False)
    return stored(product)


@case("matmul_dtypes", r"is bfloat16, moving .* is float32; allowed: float32 with float32",
      ones(8, 8, dtype=BF16))  # fmt: skip
def transpose_by_another_dtype(x: Any, bad: bool) -> Any:
    tile, turned = nl.load(x), psum(8, 8, dtype=nl.bfloat16)
    identity = nl.shared_identity_matrix(8, dtype=nl.float32 if bad else nl.bfloat16)
    nisa.nc_matmul(turned, tile, identity, is_transpose=True)
    return stored(turned)


@case("integer_reduce", r"operand reduce_res .* has dtype int32; allowed: float", ones(4, 8))
def integer_sum(x: Any, bad: bool) -> Any:
    tile, total = nl.load(x), sbuf(4, 1, dtype=nl.int32 if bad else nl.float32)
    nisa.tensor_scalar_reduce(tile, tile, nl.multiply, 2.0, nl.add, reduce_res=total)
    return stored(total)


@case(
    "square_sum",
    r"activation_reduce: op nl.square with a reduction; use nisa.activation",
    ones(4, 8),
)
def sum_of_squares(x: Any, bad: bool) -> Any:
    tile, total = nl.load(x), sbuf(4, 1)
    if bad:
        nisa.activation_reduce(tile, nl.square, tile, nl.add, total)
    else:
        nisa.activation(tile, nl.square, tile)
        nisa.tensor_reduce(total, nl.add, tile, axis=1)
    return stored(total)


@case("tile_rank", r"shape \(8,\) has 1 dimensions; allowed: 2..5", ones(8, 8))
def one_dimension(x: Any, bad: bool) -> Any:
    tile = nl.ndarray((8,) if bad else (8, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(tile, 1.0)
    return stored(tile)


@case("tile_rank", r"has 6 dimensions; allowed: 2..5", ones(8, 64))
def six_dimensions(x: Any, bad: bool) -> Any:
    tile = nl.load(x)
    shape = (8, 2, 2, 2, 2, 4) if bad else (8, 2, 2, 2, 8)
    view = tile.reshape(shape)
    nisa.tensor_scalar(view, view, nl.add, 1.0)
    return stored(tile)


@case("hbm_rank", r"has 6 dimensions; allowed: 1..5", ones(8, 64))
def six_dimensions_of_hbm(x: Any, bad: bool) -> Any:
    shape = (2, 2, 2, 2, 2, 16) if bad else (2, 2, 2, 4, 16)
    return stored(nl.load(x.reshape(shape).reshape((8, 64))))


# --- also documented ---


@case("two_psum_inputs", r"both in PSUM; at most one", ones(8, 8, dtype=BF16))
def both_inputs_in_psum(x: Any, bad: bool) -> Any:
    tile, a, result = nl.load(x), psum(8, 8), sbuf(8, 8)
    nisa.nc_matmul(a, tile, tile, accumulate=False)
    b = psum(8, 8) if bad else sbuf(8, 8)
    nisa.tensor_copy(b, a)
    nisa.tensor_tensor(result, a, b, nl.add)
    return stored(result)


@case("gpsimd_psum", r"GpSimd cannot access PSUM", ones(8, 8))
def gpsimd_reads_psum(x: Any, bad: bool) -> Any:
    tile, copy = psum(8, 8), sbuf(8, 8)
    nisa.tensor_copy(tile, nl.load(x))
    nisa.tensor_copy(copy, tile, engine=nisa.engine.gpsimd if bad else nisa.engine.vector)
    return stored(copy)


@case("transpose_dtype", r"dst has dtype float32, data bfloat16", ones(8, 8, dtype=BF16))
def transpose_casts(x: Any, bad: bool) -> Any:
    turned = psum(8, 8, dtype=nl.float32 if bad else nl.bfloat16)
    nisa.nc_transpose(turned, nl.load(x))
    return stored(turned)


@case("matmul_mixed", r"stationary is bfloat16, moving is float32", ones(8, 8, dtype=BF16))
def sum_of_mixed_dtypes(x: Any, bad: bool) -> Any:
    tile, product = nl.load(x), psum(8, 8)
    other = sbuf(8, 8, dtype=nl.float32 if bad else nl.bfloat16)
    nisa.tensor_copy(other, tile)
    nisa.nc_matmul(product, tile, other, accumulate=False)
    return stored(product)


ROWS = np.array([[4], [0], [8], [12]], np.int32)
TWICE = np.array([[4], [4], [8], [12]], np.int32)


@case("gather_hwdge", r"vector_offset with dge_mode.hwdge; allowed: unknown, swdge",
      ones(16, 8), ROWS)  # fmt: skip
def gather_by_hardware(x: Any, index: Any, bad: bool) -> Any:
    tile, mode = sbuf(4, 8), nisa.dge_mode.hwdge if bad else nisa.dge_mode.swdge
    source = x.ap([[8, 4], [1, 8]], vector_offset=nl.load(index))
    nisa.dma_copy(tile, source, dge_mode=mode)
    return stored(tile)


@case("repeated_rows", r"row 4 of dst 'out' is written more than once", ones(4, 8), TWICE,
      legal=(ones(4, 8), ROWS))  # fmt: skip
def one_row_twice(x: Any, index: Any, bad: bool) -> Any:
    out = nl.zeros((16, 8), nl.float32, nl.shared_hbm)
    nisa.dma_copy(out.ap([[8, 4], [1, 8]], vector_offset=nl.load(index)), nl.load(x))
    return out


@case("column_dtype", r"operand0 .* has dtype bfloat16; allowed: float32", ones(8, 8))
def bf16_column(x: Any, bad: bool) -> Any:
    tile, column = nl.load(x), sbuf(8, 1, dtype=nl.bfloat16 if bad else nl.float32)
    nisa.memset(column, 2.0)
    nisa.tensor_scalar(tile, tile, nl.multiply, column)
    return stored(tile)


@case("start", r"1 partitions from partition 1; allowed start partitions: 0, 32, 64, 96",
      ones(64, 8))  # fmt: skip
def start_beside_a_quadrant(x: Any, bad: bool) -> Any:
    tile, row, at = nl.load(x), sbuf(1, 8), 1 if bad else 32
    nisa.tensor_copy(row, tile[at : at + 1])
    return stored(row)


@case("partition_step", r"steps over 2 partitions", ones(8, 8))
def every_second_partition(x: Any, bad: bool) -> Any:
    tile, part, step = nl.load(x), sbuf(4, 8), 16 if bad else 8
    nisa.tensor_copy(part, tile.ap([[step, 4], [1, 8]]))
    return stored(part)


@case("divide", r"nl.divide", ones(8, 8))
def quotient(x: Any, bad: bool) -> Any:
    tile = nl.load(x)
    nisa.tensor_scalar(tile, tile, nl.divide if bad else nl.multiply, 2.0)
    return stored(tile)


@case("column_of_tensor_tensor", r"nisa.tensor_scalar takes a column", ones(8, 8))
def column_against_a_tile(x: Any, bad: bool) -> Any:
    tile = nl.load(x)
    if bad:
        nisa.tensor_tensor(tile, tile, tile[:, :1], nl.add)
    else:
        nisa.tensor_scalar(tile, tile, nl.add, nl.load(x[:, :1]))
    return stored(tile)


@case("moving_size", r"operand moving has 513 elements per partition \(N\); limit 512",
      ones(8, 513, dtype=BF16))  # fmt: skip
def too_wide(x: Any, bad: bool) -> Any:
    tile, columns = nl.load(x), 513 if bad else 512
    with nki.strict(psum_bank="off"):
        product = psum(8, columns)
    nisa.nc_matmul(product, tile[:, :8], tile[:, :columns], accumulate=False)
    return stored(product)


@case("nan_index", r"row index -1 .* is outside the tensor", ones(4, 8) * np.nan, ones(8, 8),
      legal=(ones(4, 8), ones(8, 8)))  # fmt: skip
def index_of_a_nan(x: Any, table: Any, bad: bool) -> Any:
    tile, best, at = nl.load(x), sbuf(4, 8), sbuf(4, 8, dtype=nl.uint32)
    nisa.max8(best, tile)
    nisa.nc_find_index8(at, tile, best)
    result = sbuf(4, 8)
    rows = at.view(nl.int32)[:, 0:1]
    nisa.dma_copy(result, table.ap([[8, 4], [1, 8]], vector_offset=rows))
    return stored(result)


@case("unwritten", r"reads 4 of 4 elements that nothing has written", ones(4, 8))
def nothing_written(x: Any, bad: bool) -> Any:
    tile, total = nl.load(x), sbuf(4, 1)
    if not bad:
        nisa.memset(total, 0.0)
    nisa.tensor_scalar(tile, tile, nl.add, total)
    return stored(tile)
