"""Cases of the rules on DMA, views and outputs."""

from typing import Any

import numpy as np

from segattn.reference import nki
from segattn.tests.nki.field_rule_cases import (
    BF16,
    add_one,
    case,
    ones,
    own_output,
    sbuf,
    stored,
)

nl, nisa = nki.language, nki.isa

ROWS = np.array([[4], [0], [8], [12]], np.int32)
HOLES = np.array([[4], [-1], [8], [12]], np.int32)


def gathered(x: Any, rows: Any, width: int, **options: Any) -> Any:
    """[4, width]: rows of x by index."""
    tile = sbuf(4, width)
    nisa.memset(tile, 0.0)
    nisa.dma_copy(tile, x.ap([[8, 4], [1, width]], vector_offset=rows), **options)
    return tile


@case("row_span", r"moves elements 0..15 from the start of an indexed row of 8", ones(16, 8), ROWS)
def beyond_the_row(x: Any, index: Any, bad: bool) -> Any:
    return stored(gathered(x, nl.load(index), 16 if bad else 8))


@case("row_span", r"moves elements 4..11 from the start of an indexed row of 8", ones(16, 8), ROWS)
def beyond_the_row_from_its_middle(x: Any, index: Any, bad: bool) -> Any:
    rows, tile, width = nl.load(index), sbuf(4, 8), 8 if bad else 4
    source = x.ap([[8, 4], [1, width]], offset=4, vector_offset=rows)
    nisa.dma_copy(tile[:, :width], source)
    return stored(tile[:, :width])


@case("row_span", r"operand dst .* moves elements 0..15 from the start", ones(4, 16), ROWS)
def scattered_beyond_the_row(x: Any, index: Any, bad: bool) -> Any:
    out = nl.zeros((20, 8), nl.float32, nl.shared_hbm)
    wide = out if bad else out.reshape((10, 16))
    rows = nl.load(index)
    if not bad:
        nisa.tensor_scalar(rows, rows, nl.right_shift, 1)
    target = wide.ap([[16, 4], [1, 16]], vector_offset=rows)
    nisa.dma_copy(target, nl.load(x))
    return out


@case("index_columns", r"vector_offset of shape \(4, 2\) for 4 rows; allowed: one index per",
      ones(16, 8), np.zeros((4, 2), np.int32))  # fmt: skip
def two_index_columns(x: Any, index: Any, bad: bool) -> Any:
    rows, tile = nl.load(index), sbuf(4, 16)
    for column in range(2):
        chosen = rows if bad else rows[:, column : column + 1]
        source = x.ap([[8, 4], [1, 8]], vector_offset=chosen)
        nisa.dma_copy(tile[:, 8 * column : 8 * column + 8], source)
    return stored(tile)


@case("negative_row", r"leaves out row -5; of the negative rows only -1", ones(16, 8),
      np.array([[4], [-5], [8], [12]], np.int32), legal=(ones(16, 8), HOLES))  # fmt: skip
def computed_negative_row(x: Any, index: Any, bad: bool) -> Any:
    return stored(gathered(x, nl.load(index), 8, oob_mode=nisa.oob_mode.skip))


@case("negative_row", r"leaves out row -5", ones(16, 8), np.array([[-5]], np.int32),
      legal=(ones(16, 8), np.array([[-1]], np.int32)))  # fmt: skip
def computed_negative_offset(x: Any, index: Any, bad: bool) -> Any:
    tile, at = nl.zeros((1, 8), nl.float32), nl.load(index)
    source = x.ap([[8, 1], [1, 8]], scalar_offset=at)
    nisa.dma_copy(tile, source, oob_mode=nisa.oob_mode.skip)
    return stored(tile)


@case(
    "hbm_scatter", r"scatters rows of 'x' in shared_hbm to rows of 'out' in HBM", ones(4, 8), ROWS
)
def scatter_from_hbm(x: Any, index: Any, bad: bool) -> Any:
    out = nl.zeros((16, 8), nl.float32, nl.shared_hbm)
    target = out.ap([[8, 4], [1, 8]], vector_offset=nl.load(index))
    nisa.dma_copy(target, x if bad else nl.load(x))
    return out


def scatter_add(out: Any, rows: Any, values: Any, **options: Any) -> None:
    target = out.ap([[8, 4], [1, 8]], vector_offset=rows)
    nisa.dma_compute(target, [target, values], reduce_op=nl.add, **options)


@case("scatter_add_skip", r"leaves out 1 rows whose index is out of bounds", ones(4, 8), HOLES,
      legal=(ones(4, 8), ROWS))  # fmt: skip
def scatter_add_with_holes(x: Any, index: Any, bad: bool) -> Any:
    out = nl.zeros((16, 8), nl.float32, nl.shared_hbm)
    scatter_add(out, nl.load(index), nl.load(x), oob_mode=nisa.oob_mode.skip)
    return out


@case("scatter_add_after_copy", r"scatter-add to 'out', into which the dma_copy of line",
      ones(2, 4, 8), ROWS, cores=2)  # fmt: skip
def scatter_add_right_after_copy(x: Any, index: Any, bad: bool) -> Any:
    core = nl.program_id(0)
    out = nl.ndarray((2, 16, 8), dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(out[core], nl.zeros((16, 8), nl.float32))
    if not bad:
        nisa.core_barrier(out, (0, 1))
    rows = nl.load(index)
    nisa.tensor_scalar(rows, rows, nl.add, 16 * core)
    flat = out.reshape((32, 8))
    scatter_add(flat, rows, nl.load(x[core]))
    return out


@case("shared_scratch", r"core \d reads bytes of 'scratch' that both cores have written",
      ones(4, 8), cores=2)  # fmt: skip
def scratch_of_both_cores(x: Any, bad: bool) -> Any:
    buffer = nl.shared_hbm if bad else nl.private_hbm
    scratch = nl.ndarray((4, 8), dtype=nl.float32, buffer=buffer)
    nisa.dma_copy(scratch, nl.load(x))
    return own_output(nl.load(scratch))


@case("loop_dge", r"dge_mode.none in the body of nl.fori_loop .* allowed in a loop: unknown",
      ones(4, 8))  # fmt: skip
def host_descriptors_in_a_loop(x: Any, bad: bool) -> Any:
    tile, mode = sbuf(4, 8), nisa.dge_mode.none if bad else nisa.dge_mode.hwdge
    nisa.dma_copy(tile, x, dge_mode=nisa.dge_mode.none)
    nl.fori_loop(0, 2, lambda i: nisa.dma_copy(tile, x, dge_mode=mode) and None)
    return stored(tile)


@case("loop_skip", r"oob_mode.skip in the body of nl.fori_loop .* compiler may want to spill",
      ones(16, 8), HOLES)  # fmt: skip
def skip_in_a_loop(x: Any, index: Any, bad: bool) -> Any:
    """Legal: where the tile lies is not for the compiler to choose."""
    rows, total = nl.load(index), nl.zeros((4, 8), nl.float32)

    def body(i: Any) -> None:
        tile = nl.ndarray((4, 8), nl.float32, address=None if bad else (0, 0))
        nisa.memset(tile, 0.0)
        source = x.ap([[8, 4], [1, 8]], vector_offset=rows)
        nisa.dma_copy(tile, source, oob_mode=nisa.oob_mode.skip)
        nisa.tensor_tensor(total, total, tile, nl.add)

    nl.fori_loop(0, 2, body)
    return stored(total)


@case("dma_reshape", r"the 8 partitions of '.*' cut through rows", ones(4, 8))
def forgotten_transpose(x: Any, bad: bool) -> Any:
    tile = sbuf(8, 4) if bad else sbuf(4, 8)
    nisa.dma_copy(tile, x)
    return stored(tile)


@case("dma_cast", r"casts float32 to int32 on the way", ones(4, 8))
def integers_by_dma(x: Any, bad: bool) -> Any:
    tile = sbuf(4, 8, dtype=nl.int32 if bad else nl.float32)
    nisa.dma_copy(tile, x)
    return stored(tile)


@case("transpose_rows", r"rows of dst .* are 16 bytes apart; allowed: multiples of 32",
      ones(8, 8, dtype=BF16))  # fmt: skip
def short_rows(x: Any, bad: bool) -> Any:
    tile = sbuf(8, 8 if bad else 16, dtype=nl.bfloat16)
    nisa.dma_transpose(tile[:, :8], x)
    return stored(tile[:, :8])


@case("ap_view", r"on a view of 'x' \(shape \(4, 8\) from element 32\)", ones(8, 8))
def pattern_on_a_part(x: Any, bad: bool) -> Any:
    part = x[4:8].ap([[8, 4], [1, 8]], offset=0) if bad else x.ap([[8, 4], [1, 8]], offset=32)
    return stored(nl.load(part))


@case("partial_output", r"16 of 32 elements of the kernel output 'out' are never written",
      ones(4, 8))  # fmt: skip
def half_an_output(x: Any, bad: bool) -> Any:
    out = nl.ndarray((4, 8), dtype=nl.float32, buffer=nl.shared_hbm)
    rows = 2 if bad else 4
    nisa.dma_copy(out[:rows], x[:rows])
    return out


@case("partition_offset", r"scalar offset 3 x step 1 leaves the 4 elements of a partition",
      ones(4, 4), np.array([[3]], np.int32),
      legal=(ones(4, 4), np.array([[2]], np.int32)))  # fmt: skip
def offset_into_the_next_partition(x: Any, at: Any, bad: bool) -> Any:
    tile, part, index = nl.load(x), sbuf(4, 2), nl.load(at)
    nisa.dma_copy(part, tile.ap([[4, 4], [1, 2]], scalar_offset=index, indirect_dim=1))
    return stored(part)


@case("partition_offset", r"index 3 on a dimension that has 0..2", ones(4, 3, 4),
      np.array([[3]], np.int32),
      legal=(ones(4, 3, 4), np.array([[2]], np.int32)))  # fmt: skip
def index_beyond_its_dimension(x: Any, at: Any, bad: bool) -> Any:
    """It stays in the partition; a static nl.ds or index is refused just so."""
    tile, part, register = nl.load(x), sbuf(4, 3, 2), nisa.register_alloc()
    nisa.register_load(register, nl.load(at))
    nisa.dma_copy(part, tile[:, :, nl.ds(register, 2)])
    return stored(part)


@case("dynamic_operand", r"operand 'tile' in sbuf has a run-time offset", ones(4, 4),
      np.array([[2]], np.int32))  # fmt: skip
def compute_at_a_run_time_offset(x: Any, at: Any, bad: bool) -> Any:
    tile = nl.load(x)
    part = sbuf(4, 2)
    chosen = tile.ap([[4, 4], [1, 2]], scalar_offset=nl.load(at), indirect_dim=1)
    if bad:
        nisa.tensor_copy(part, chosen)
    else:
        nisa.dma_copy(part, chosen)
    add_one(part)
    return stored(part)
