"""What the interpreter writes into a trace."""

from typing import Any

import numpy as np

from segattn.reference import nki
from segattn.reference.nki.records import Dma, Instruction, LoopMark, Matmul
from segattn.reference.nki.trace import Trace

nl, nisa = nki.language, nki.isa


@nki.jit
def looped_kernel(table: Any, count: Any) -> Any:
    out = nl.ndarray((4, 8), dtype=table.dtype, buffer=nl.shared_hbm)
    total = nl.zeros((4, 8), dtype=nl.float32)
    end = nisa.register_alloc()
    nisa.register_load(end, nl.load(count))

    def body(i: Any) -> None:
        rows = nl.ndarray((4, 8), dtype=table.dtype)
        nisa.dma_copy(rows, table.ap([[8, 4], [1, 8]], scalar_offset=i, indirect_dim=0))
        nisa.tensor_tensor(total, total, rows, nl.add)

    nl.fori_loop(0, end, body)
    nisa.dma_copy(out, total)
    return out


def test_registers_loops_and_run_time_offsets_are_recorded() -> None:
    table = np.arange(48, dtype=np.float32).reshape(6, 8)
    with Trace() as trace:
        looped_kernel(table, np.array([[2]], np.int32))
    (launch,) = trace.launches
    assert launch.kernel == "looped_kernel"
    records = launch.records
    load = next(r for r in records if isinstance(r, Instruction) and r.opcode == "register_load")
    begin = next(r for r in records if isinstance(r, LoopMark) and r.edge == "begin")
    assert load.writes[0].buffer == "register"
    assert begin.reads == load.writes
    copies = [r for r in records if isinstance(r, Dma) and r.iteration]
    assert [r.reads[0].offset for r in copies] == [0, 32]
    assert [r.reads[1].buffer for r in copies] == ["register", "register"]
    assert [r.iteration for r in copies] == [(0,), (1,)]


def test_addresses_banks_and_engines_are_recorded() -> None:
    @nki.jit
    def kernel() -> None:
        a = nl.zeros((128, 64), dtype=nl.bfloat16)
        tiles = [nl.ndarray((64, 512), nl.float32, nl.psum) for _ in range(3)]
        for tile in tiles:
            nisa.nc_matmul(tile[:, 0:64], a, a)
        placed = nl.ndarray((32, 16), dtype=nl.float32, address=(64, 4096))
        nisa.tensor_copy(placed[:, 4:8], tiles[0][0:32, 0:4], engine=nisa.engine.scalar)

    with Trace() as trace:
        kernel()
    records = trace.launches[0].records
    matmuls = [r for r in records if isinstance(r, Matmul)]
    assert len({r.writes[0].offset // 2048 for r in matmuls}) == 3
    assert (matmuls[0].K, matmuls[0].M, matmuls[0].N) == (128, 64, 64)
    copy = records[-1]
    assert isinstance(copy, Instruction)
    assert (copy.engine, copy.opcode) == ("scalar", "tensor_copy")
    written = copy.writes[0]
    assert (written.partition, written.offset, written.shape) == (64, 4096 + 16, (32, 4))
    assert written.strides == (1, 4)


def test_nothing_is_recorded_without_a_trace() -> None:
    with Trace() as trace:
        pass
    looped_kernel(np.zeros((6, 8), np.float32), np.array([[1]], np.int32))
    assert trace.launches == []
