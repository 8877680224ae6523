"""The cost of instructions that a kernel executed: what they record is what they did.

Every size, position and count is different from the others, so that none can stand for another.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from segattn.reference import nki
from segattn.reference.nki.cost.constants import BASE
from segattn.reference.nki.cost.result import CostResult, evaluate
from segattn.reference.nki.records import Dma, Matmul
from segattn.reference.nki.trace import Trace

nl, nisa = nki.language, nki.isa


def modelled(body: Callable[[], None]) -> CostResult:
    """One launch of a kernel that takes nothing."""
    kernel = nki.jit(body)
    with Trace() as trace:
        kernel()
    (launch,) = trace.launches
    return evaluate(launch, BASE.with_measured({"tensor_ramp_ns": 0}))


def matmuls(result: CostResult) -> list[tuple[Matmul, tuple[int, ...], float]]:
    """Record, quadrants and start of each matmul."""
    times = zip(result.plan.steps, result.timings, strict=True)
    return [(s.record, s.quadrants, t.start) for s, t in times if isinstance(s.record, Matmul)]


def zeros(rows: int, columns: int, start: int = 0, byte: int = 0) -> Any:
    tile = nl.ndarray((rows, columns), dtype=nl.bfloat16, buffer=nl.sbuf, address=(start, byte))
    nisa.memset(tile, 0.0)
    return tile


def test_a_tile_of_the_array_is_charged_where_it_lies_and_as_large_as_it_is() -> None:
    def kernel() -> None:
        left, right = zeros(32, 64, 96), zeros(32, 448, 96, 1024)
        out = nl.ndarray((64, 448), dtype=nl.float32, buffer=nl.psum, address=(64, 0))
        nisa.nc_matmul(out, left, right, tile_position=(96, 64), tile_size=(32, 64))

    result = modelled(kernel)
    ((record, quadrants, _),) = matmuls(result)
    assert (record.tile_position, record.tile_size) == ((96, 64), (32, 64))
    assert (record.K, record.M, record.N) == (32, 64, 448)
    # The last of four rows of blocks of 32 x 32, its third and fourth column.
    assert quadrants == (14, 15)
    assert result.busy_ns[0, "tensor"] == pytest.approx(448 / 2.4 * 2 / 16, rel=1e-6)


@pytest.mark.parametrize(
    ("positions", "size"),
    [(((0, 0), (32, 0), (96, 0)), (32, 128)), (((0, 0), (0, 64)), (128, 64))],
    ids=["row tiles", "column tiles"],
)
def test_tiles_of_the_array_that_do_not_overlap_run_side_by_side(
    positions: tuple[tuple[int, int], ...], size: tuple[int, int]
) -> None:
    rows, columns = size

    def kernel() -> None:
        operands = []
        for i, (row, column) in enumerate(positions):
            left = zeros(rows, columns, row, 4096 * i)
            right = zeros(rows, 448, row, 4096 * i + 1024)
            place = (column, 2048 * i)
            out = nl.ndarray((columns, 448), dtype=nl.float32, buffer=nl.psum, address=place)
            operands.append((out, left, right, (row, column)))
        for _ in range(9):
            for out, left, right, position in operands:
                nisa.nc_matmul(out, left, right, tile_position=position, tile_size=size)

    starts = [start for _, _, start in matmuls(modelled(kernel))]
    # One tile after the other would take 9 len(positions) - 1 times.
    assert starts[-1] - starts[len(positions) - 1] == pytest.approx(8 * 448 / 2.4)


def test_tiles_at_one_place_of_the_array_wait_for_each_other() -> None:
    def kernel() -> None:
        left, right = zeros(64, 32, 64), zeros(64, 448, 64, 1024)
        for i in range(2):
            place = (96, 2048 * i)
            out = nl.ndarray((32, 448), dtype=nl.float32, buffer=nl.psum, address=place)
            nisa.nc_matmul(out, left, right, tile_position=(64, 96), tile_size=(64, 32))

    first, second = (start for _, _, start in matmuls(modelled(kernel)))
    assert second - first == pytest.approx(448 / 2.4)


def dma_of(result: CostResult) -> tuple[Dma, int]:
    """The last DMA and how many bytes it moved."""
    moved = [s for s in result.plan.steps if s.transfer is not None]
    record, transfer = moved[-1].record, moved[-1].transfer
    assert isinstance(record, Dma)
    assert transfer is not None
    return record, transfer.nbytes


def test_a_transpose_whose_address_is_out_of_bounds_moves_nothing() -> None:
    def kernel() -> None:
        table = nl.ndarray((3, 48, 32), dtype=nl.bfloat16, buffer=nl.private_hbm)
        for i in range(3):
            nisa.dma_copy(table[i], zeros(48, 32))
        row = nisa.register_alloc(5)
        columns = nl.ndarray((32, 48), dtype=nl.bfloat16, buffer=nl.sbuf)
        nisa.memset(columns, 0.0)
        source = table.ap([[32, 48], [1, 32]], scalar_offset=row, indirect_dim=0)
        nisa.dma_transpose(columns, source, oob_mode=nisa.oob_mode.skip)

    record, nbytes = dma_of(modelled(kernel))
    assert (record.skipped_rows, record.transpose, nbytes) == (48, True, 0)


def test_the_index_of_an_accumulating_gather_is_no_source() -> None:
    def kernel() -> None:
        table = nl.ndarray((96, 1), dtype=nl.float32, buffer=nl.private_hbm)
        total = nl.ndarray((48, 1), dtype=nl.float32, buffer=nl.sbuf)
        index = nl.ndarray((48, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.memset(total, 0.0)
        nisa.iota(index, [[0, 1]], channel_multiplier=1)
        source = nl.ndarray((96, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(source, 0.0)
        nisa.dma_copy(table, source)
        rows = table.ap([[1, 48], [1, 1]], vector_offset=index, indirect_dim=0)
        nisa.dma_compute(total, [total, rows], reduce_op=nl.add)

    result = modelled(kernel)
    (step,) = [s for s in result.plan.steps if s.record.opcode == "dma_compute"]
    assert step.transfer is not None
    assert step.transfer.num_descriptors == 2 * 48


def test_arithmetic_on_the_scalar_engine_loads_no_activation_table() -> None:
    def kernel() -> None:
        x = nl.ndarray((96, 48), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(x, 1.0)
        for _ in range(2):
            nisa.activation(x, nl.exp, x)
            nisa.tensor_scalar(x, x, nl.multiply, 0.5, engine=nisa.engine.scalar)

    result = modelled(kernel)
    loads = round(result.busy_ns[0, "scalar"] // BASE.act_table_load_ns)
    assert loads == 1
    assert np.isfinite(result.modelled_ns)
