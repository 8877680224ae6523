"""What a kernel's trace says about memory: reused PSUM banks, addressed tiles, loops, gathers."""

import numpy as np

from segattn.reference import nki
from segattn.reference.nki import isa as nisa
from segattn.reference.nki import language as nl
from segattn.reference.nki.cost.constants import BASE
from segattn.reference.nki.cost.dependencies import hazards
from segattn.reference.nki.cost.needs import needs
from segattn.reference.nki.cost.result import evaluate
from segattn.reference.nki.trace import Dma, Instruction, Launch, LoopMark, Matmul, Trace

ROWS = np.ones((128, 128), np.float32)


def traced(kernel: nki.Kernel, *arguments: object) -> Launch:
    with Trace() as trace:
        kernel(*arguments)
    (launch,) = trace.launches
    return launch


@nki.jit
def many_banks(x: nl.NkiTensor) -> nl.NkiTensor:
    """Nine matmuls into PSUM tiles of one bank each, all copied out."""
    out = nl.ndarray((128, 128), dtype=nl.float32, buffer=nl.shared_hbm)
    rows = nl.ndarray((128, 128), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=rows, src=x)
    result = nl.ndarray((128, 9 * 128), dtype=nl.float32, buffer=nl.sbuf)
    for i in range(9):
        bank = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=bank[:, 0:128], stationary=rows, moving=rows)
        nisa.tensor_copy(dst=result[:, i * 128 : (i + 1) * 128], src=bank[:, 0:128])
    nisa.dma_copy(dst=out, src=result[:, 8 * 128 : 9 * 128])
    return out


def test_a_psum_bank_that_is_used_again_waits_for_its_reader() -> None:
    launch = traced(many_banks, ROWS)
    edges = hazards(launch.records)
    matmuls = [i for i, r in enumerate(launch.records) if isinstance(r, Matmul)]
    banks = [
        record.writes[0].offset // 2048 for record in launch.records if isinstance(record, Matmul)
    ]
    assert sorted(banks[:8]) == list(range(8))
    assert banks[8] == banks[0]
    assert {e.producer for e in edges[matmuls[8]] if e.hazard == "WAR"} == {matmuls[0] + 1}
    assert not any(e.hazard == "WAR" for i in matmuls[:8] for e in edges[i])


@nki.jit
def one_place(x: nl.NkiTensor) -> nl.NkiTensor:
    """Two tiles at the same SBUF address, one after the other."""
    out = nl.ndarray((128, 128), dtype=nl.float32, buffer=nl.shared_hbm)
    first = nl.ndarray((128, 128), dtype=nl.float32, buffer=nl.sbuf, address=(0, 1024))
    nisa.dma_copy(dst=first, src=x)
    nisa.dma_copy(dst=out, src=first)
    second = nl.ndarray((128, 128), dtype=nl.float32, buffer=nl.sbuf, address=(0, 1280))
    nisa.memset(dst=second, value=1.0)
    nisa.dma_copy(dst=out, src=second)
    return out


def test_tiles_at_overlapping_addresses_order_their_users() -> None:
    launch = traced(one_place, ROWS)
    edges = hazards(launch.records)
    fill = next(
        i
        for i, r in enumerate(launch.records)
        if isinstance(r, Instruction) and r.opcode == "memset"
    )
    assert {(e.producer, e.hazard) for e in edges[fill]} == {(0, "WAW"), (1, "WAR")}


@nki.jit
def counted(x: nl.NkiTensor, trips: nl.NkiTensor) -> nl.NkiTensor:
    """`trips` additions in a dynamic loop."""
    out = nl.ndarray((128, 128), dtype=nl.float32, buffer=nl.shared_hbm)
    rows = nl.ndarray((128, 128), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=rows, src=x)
    number = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=number, src=trips)
    register = nisa.register_alloc()
    nisa.register_load(register, number)

    def body(i: nisa.VirtualRegister) -> None:
        nisa.tensor_scalar(dst=rows, data=rows, op0=nl.add, operand0=1.0)

    nl.fori_loop(0, register, body)
    nisa.dma_copy(dst=out, src=rows)
    return out


def test_a_dynamic_loop_is_marked_and_its_trips_are_numbered() -> None:
    launch = traced(counted, ROWS, np.array([[3]], np.int32))
    marks = [r.edge for r in launch.records if isinstance(r, LoopMark)]
    assert marks == ["begin", "iteration", "iteration", "iteration", "end"]
    additions = [
        r.iteration
        for r in launch.records
        if isinstance(r, Instruction) and r.opcode == "tensor_scalar"
    ]
    assert additions == [(0,), (1,), (2,)]
    result = evaluate(launch)
    assert (
        needs(result).num_instructions
        == len([r for r in launch.records if isinstance(r, Instruction)]) - 2
    )
    empty = evaluate(traced(counted, ROWS, np.array([[0]], np.int32)))
    # A loop without a trip costs one trip's time too.
    assert result.modelled_ns - empty.modelled_ns > 2 * BASE.loop_iteration_ns


def test_the_loop_waits_for_the_register_that_holds_its_bound() -> None:
    launch = traced(counted, ROWS, np.array([[1]], np.int32))
    edges = hazards(launch.records)
    begin = next(i for i, r in enumerate(launch.records) if isinstance(r, LoopMark))
    producers = [launch.records[e.producer] for e in edges[begin]]
    assert [p.opcode for p in producers] == ["register_load"]


@nki.jit
def gathered(x: nl.NkiTensor, index: nl.NkiTensor) -> nl.NkiTensor:
    """Rows of x by index; negative ones are skipped."""
    out = nl.ndarray((128, 128), dtype=nl.float32, buffer=nl.shared_hbm)
    chosen = nl.ndarray((128, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=chosen, src=index)
    rows = nl.ndarray((128, 128), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=rows, value=0.0)
    nisa.dma_copy(
        dst=rows,
        src=x.ap([[128, 128], [1, 128]], vector_offset=chosen, indirect_dim=0),
        oob_mode=nisa.oob_mode.skip,
    )
    nisa.dma_copy(dst=out, src=rows)
    return out


def test_a_gather_counts_skipped_rows_and_reads_its_index() -> None:
    index = np.arange(128, dtype=np.int32)[:, None]
    index[:40] = -1
    launch = traced(gathered, ROWS, index)
    (gather,) = [r for r in launch.records if isinstance(r, Dma) and r.reads[0].indirect]
    assert gather.skipped_rows == 40
    assert gather.reads[1].shape == (128, 1)
    (step,) = [s for s in evaluate(launch).plan.steps if s.record is gather]
    assert step.transfer is not None
    assert step.transfer.nbytes == 88 * 512
    assert step.stream == (0, "gpsimd")


@nki.jit
def moved_to(x: nl.NkiTensor, row: nl.NkiTensor) -> nl.NkiTensor:
    """Stores to a fixed place, then to a row that only a register knows."""
    out = nl.ndarray((4, 128, 128), dtype=nl.float32, buffer=nl.shared_hbm)
    rows = nl.ndarray((128, 128), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=rows, src=x)
    for i in range(4):
        nisa.dma_copy(dst=out[i], src=rows)
    number = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=number, src=row)
    register = nisa.register_alloc()
    nisa.register_load(register, number)
    nisa.dma_copy(
        dst=out.ap([[128, 128], [1, 128]], scalar_offset=register, indirect_dim=0), src=rows
    )
    return out


def test_a_run_time_address_meets_what_lies_there_and_waits_for_its_register() -> None:
    launch = traced(moved_to, ROWS, np.array([[2]], np.int32))
    last = len(launch.records) - 1
    edges = hazards(launch.records)[last]
    assert {e.producer for e in edges if e.hazard == "WAW"} == {3}
    awaited = {launch.records[e.producer].opcode for e in edges if e.hazard == "RAW"}
    assert awaited == {"dma_copy", "register_load"}
