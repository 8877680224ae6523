"""The instruction trace: what a record says about memory, loops, cores and source lines."""

import sys

import pytest

from segattn.reference.nki import trace as trace_module
from segattn.reference.nki.trace import Access, Dma, Instruction, LoopMark, Matmul, Trace


def sbuf(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int = 2) -> Access:
    return Access(7, "sbuf", "bfloat16", itemsize, 0, 0, shape, strides)


def active() -> Trace | None:
    return trace_module.active


def test_sizes_count_partitions_and_elements_per_partition() -> None:
    tile = sbuf((128, 4, 16), (1, 256, 2))
    assert (tile.num_partitions, tile.free_size, tile.num_elements) == (128, 64, 8192)
    assert tile.nbytes == 16384
    rows = Access(1, "hbm", "float32", 4, 0, 0, (3, 5), (20, 4))
    assert (rows.num_partitions, rows.free_size, rows.nbytes) == (1, 15, 60)


def test_a_contiguous_run_merges_dimensions_that_follow_each_other() -> None:
    assert sbuf((128, 4, 16), (1, 32, 2)).run_bytes == 128
    assert sbuf((128, 4, 16), (1, 64, 2)).run_bytes == 32
    assert sbuf((128, 16), (1, 8)).run_bytes == 2
    assert sbuf((128, 1, 16, 1), (1, 999, 2, 999)).run_bytes == 32


def test_indirect_rows_end_a_run_although_their_strides_follow() -> None:
    rows = Access(1, "hbm", "bfloat16", 2, 0, 0, (128, 256), (512, 2))
    assert rows.run_bytes == 128 * 512
    assert rows._replace(indirect=True).run_bytes == 512


def test_nothing_records_until_a_trace_is_entered_and_after_it_is_left() -> None:
    assert active() is None
    with Trace() as trace:
        assert active() is trace
        with pytest.raises(RuntimeError, match="already active"):
            Trace().__enter__()
    assert active() is None


def test_a_failed_kernel_deactivates_the_trace() -> None:
    with pytest.raises(ZeroDivisionError), Trace():
        raise ZeroDivisionError
    assert active() is None


def test_a_record_names_the_line_that_called() -> None:
    trace = Trace()
    trace.launch("kernel")
    line = sys._getframe().f_lineno + 1
    trace.compute("vector", "tensor_copy", 0, (), ())
    (record,) = trace.launches[0].records
    assert isinstance(record, Instruction)
    assert record.source == (__file__, line)


def test_matmul_dimensions_come_from_its_operands() -> None:
    trace = Trace()
    trace.launch("kernel")
    dst = Access(9, "psum", "float32", 4, 0, 0, (96, 512), (1, 4))
    trace.matmul(0, dst, sbuf((64, 96), (1, 2)), sbuf((64, 512), (1, 2)))
    (record,) = trace.launches[0].records
    assert isinstance(record, Matmul)
    assert (record.K, record.M, record.N) == (64, 96, 512)


def test_iterations_number_the_trips_of_nested_dynamic_loops_per_core() -> None:
    trace = Trace()
    trace.launch("kernel", 2)
    trace.loop("begin", 0)
    for _ in range(2):
        trace.loop("iteration", 0)
        trace.compute("vector", "memset", 0, (), ())
        trace.compute("vector", "memset", 1, (), ())
        trace.loop("begin", 0)
        trace.loop("iteration", 0)
        trace.dma("dma_copy", 0, (), ())
        trace.loop("end", 0)
    trace.loop("end", 0)
    trace.compute("vector", "memset", 0, (), ())
    launch = trace.launches[0]
    work = [r for r in launch.of_core(0) if isinstance(r, Instruction)]
    assert [r.iteration for r in work] == [(0,), (0, 0), (1,), (1, 0), ()]
    assert [type(r) for r in work[:2]] == [Instruction, Dma]
    assert all(isinstance(r, Instruction) and r.iteration == () for r in launch.of_core(1))
    assert sum(isinstance(r, LoopMark) for r in launch.records) == 2 + 2 + 2 * 3


def test_each_launch_has_its_own_records() -> None:
    trace = Trace()
    for name in ("first", "second"):
        trace.launch(name)
        trace.compute("scalar", "activation", 0, (), (), op="exp")
    assert [(launch.kernel, len(launch.records)) for launch in trace.launches] == [
        ("first", 1),
        ("second", 1),
    ]
