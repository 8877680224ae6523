"""Kernels on two cores: exchange, barriers, races, deadlocks, schedules."""

import signal
import threading
from typing import Any

import numpy as np
import pytest

from segattn.reference import nki
from segattn.reference.nki.errors import (
    CoreRaceError,
    DeadlockError,
    NkiValidationError,
    NkiWarning,
    UninitializedReadError,
)

nl, nisa = nki.language, nki.isa
x = np.arange(256 * 4, dtype=np.float32).reshape(256, 4)


@nki.jit
def halves_kernel(a: Any) -> Any:
    """Each core doubles its half, then both exchange halves and core c writes half c."""
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    me = nl.program_id(0)
    mine = nl.load(a[nl.ds(me * 128, 128)])
    theirs = nl.ndarray(mine.shape, dtype=a.dtype)
    nisa.tensor_scalar(mine, mine, nl.multiply, 2.0)
    nisa.sendrecv(mine, theirs, 1 - me, 1 - me, pipe_id=0)
    nisa.dma_copy(out[nl.ds((1 - me) * 128, 128)], theirs)
    return out


@pytest.mark.parametrize("schedule", ["lockstep", "barrier"])
def test_cores_exchange_tiles_under_both_schedules(schedule: Any) -> None:
    with nki.schedule(schedule):
        np.testing.assert_array_equal(halves_kernel[2](x), 2 * x)


def test_program_ids_and_grid_are_those_of_the_launch() -> None:
    seen: list[tuple[int, int, int]] = []

    @nki.jit
    def kernel() -> None:
        seen.append((nl.program_id(0), nl.num_programs(), nl.program_ndim()))

    kernel()
    kernel[1]()
    kernel[2]()
    assert sorted(seen) == [(0, 1, 0), (0, 1, 1), (0, 2, 1), (1, 2, 1)]


def _exchange_through_hbm(with_barrier: bool) -> Any:
    @nki.jit
    def kernel(a: Any) -> Any:
        me = nl.program_id(0)
        middle = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
        out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(middle[nl.ds(me * 128, 128)], a[nl.ds(me * 128, 128)])
        if with_barrier:
            nisa.core_barrier(middle, (0, 1))
        nisa.dma_copy(out[nl.ds(me * 128, 128)], middle[nl.ds((1 - me) * 128, 128)])
        return out

    return kernel[2](x)


def test_reading_what_the_other_core_wrote_needs_a_barrier() -> None:
    np.testing.assert_array_equal(_exchange_through_hbm(True), np.roll(x, 128, axis=0))
    with pytest.raises(CoreRaceError, match="core_barrier"):
        _exchange_through_hbm(False)


@nki.strict(partial_output="off")
def test_both_cores_writing_the_same_bytes_is_a_race() -> None:
    @nki.jit
    def kernel(a: Any) -> Any:
        out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(out[0:128], a[nl.ds(nl.program_id(0) * 128, 128)])
        return out

    with pytest.raises(CoreRaceError, match=r"core 1 writes .* core 0 has written"):
        kernel[2](x)
    with nki.strict(core_race="off"):
        np.testing.assert_array_equal(kernel[2](x)[:128], x[128:])


def test_a_core_that_waits_alone_is_a_deadlock_and_not_a_hang() -> None:
    @nki.jit
    def one_ends(a: Any) -> None:
        if nl.program_id(0) == 0:
            nisa.core_barrier(a, (0, 1))

    @nki.jit
    def different_pipes(a: Any) -> None:
        tile = nl.load(a[0:128])
        got = nl.ndarray(tile.shape, dtype=tile.dtype)
        me = nl.program_id(0)
        nisa.sendrecv(tile, got, 1 - me, 1 - me, pipe_id=me)

    for kernel in (one_ends, different_pipes):
        with pytest.raises(DeadlockError, match="both cores must execute the same"):
            kernel[2](x)


def test_an_error_on_one_core_ends_the_launch() -> None:
    @nki.jit
    def kernel(a: Any) -> None:
        tile = nl.load(a[0:128])
        if nl.program_id(0) == 1:
            nisa.tensor_copy(tile, a[0:128])
        nisa.core_barrier(a, (0, 1))

    with pytest.raises(NkiValidationError, match=r"operand src .* allowed: psum, sbuf"):
        kernel[2](x)


@pytest.mark.parametrize("num_cores", [0, 3, (2, 2)])
def test_a_grid_other_than_one_or_two_cores_is_refused(num_cores: Any) -> None:
    with pytest.raises(NkiValidationError, match="allowed on trn2: 1, 2"):
        halves_kernel[num_cores]


def test_gpsimd_sendrecv_is_limited_by_bytes_per_partition() -> None:
    @nki.jit
    def kernel(a: Any) -> None:
        me = nl.program_id(0)
        got = nl.ndarray(a.shape, dtype=a.dtype)
        nisa.sendrecv(nl.load(a), got, 1 - me, 1 - me, 0, nisa.dma_engine.gpsimd_dma)

    kernel[2](np.zeros((128, 256), np.float32))
    with pytest.raises(NkiValidationError, match="1028 bytes per partition of float32; limit 1024"):
        kernel[2](np.zeros((128, 257), np.float32))


@nki.strict(shared_scratch="off")
def test_two_cores_that_store_the_same_values_do_not_race() -> None:
    @nki.jit
    def kernel(x: Any) -> Any:
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(out, x)
        tile = nl.load(out)
        nl.store(out[:, 0:2], tile[:, 0:2])
        return out

    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    np.testing.assert_array_equal(kernel[2](x.copy()), x)


def test_a_write_that_changes_what_the_other_core_wrote_is_a_race_at_its_line() -> None:
    @nki.jit
    def kernel(x: Any) -> Any:
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        tile = nl.ndarray(x.shape, dtype=x.dtype)
        nisa.memset(tile, nl.program_id(0) + 1.0)
        nisa.dma_copy(out, tile)
        return out

    with pytest.raises(CoreRaceError, match=r"core 1 writes bytes .*test_two_cores.py:\d+"):
        kernel[2](np.zeros((2, 4), np.float32))


def test_sendrecv_hands_on_which_elements_nothing_has_written() -> None:
    @nki.jit
    def kernel(x: Any, num_rows: int) -> Any:
        sent = nl.ndarray((4, 4), dtype=x.dtype)
        received = nl.ndarray((4, 4), dtype=x.dtype)
        nisa.dma_copy(sent[0:2, :], x)
        other = 1 - nl.program_id(0)
        nisa.sendrecv(sent, received, other, other, 0)
        out = nl.ndarray((num_rows, 4), dtype=x.dtype, buffer=nl.shared_hbm)
        if nl.program_id(0) == 0:
            nisa.dma_copy(out, received[0:num_rows, :])
        return out

    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    np.testing.assert_array_equal(kernel[2](x, 2), x)
    with pytest.raises(UninitializedReadError, match="4 of 12 elements"):
        kernel[2](x, 3)


@nki.jit
def scattering_kernel(rows: Any, table: Any) -> Any:
    me = nl.program_id(0)
    tile = nl.ndarray((4, 8), dtype=nl.float32)
    nisa.memset(tile, me + 1.0)
    mine = nl.load(rows[nl.ds(4 * me, 4)])
    nisa.dma_copy(table.ap([[8, 4], [1, 8]], vector_offset=mine, indirect_dim=0), tile)
    return table


def test_two_cores_may_scatter_to_different_rows_of_one_tensor() -> None:
    rows = np.array([0, 5, 2, 7, 1, 3, 6, 4], np.int32).reshape(8, 1)
    table = np.zeros((8, 8), np.float32)
    scattering_kernel[2](rows, table)
    np.testing.assert_array_equal(table[:, 0], [1, 2, 1, 2, 2, 1, 2, 1])


def test_two_cores_that_scatter_to_one_row_are_reported_by_the_rule_for_duplicates() -> None:
    rows = np.array([0, 5, 2, 7, 1, 3, 6, 5], np.int32).reshape(8, 1)
    with pytest.warns(NkiWarning, match=r"core 1 writes .* core 0 has written .*scatter_duplicate"):
        scattering_kernel[2](rows, np.zeros((8, 8), np.float32))


@pytest.mark.parametrize("row", [5, 6])
def test_gathering_a_row_that_the_other_core_wrote_needs_a_barrier(row: int) -> None:
    @nki.jit
    def kernel(rows: Any) -> Any:
        table = nl.ndarray((8, 8), dtype=nl.float32, buffer=nl.shared_hbm)
        me = nl.program_id(0)
        tile = nl.ndarray((4, 8), dtype=nl.float32)
        nisa.memset(tile, me + 1.0)
        nisa.dma_copy(table[nl.ds(4 * me, 4)], tile)
        mine = nl.load(rows[nl.ds(2 * me, 2)])
        got = nl.ndarray((2, 8), dtype=nl.float32)
        nisa.dma_copy(got, table.ap([[8, 2], [1, 8]], vector_offset=mine, indirect_dim=0))
        return table

    rows = np.array([0, 3, row, row - 2], np.int32).reshape(4, 1)
    if row == 6:
        kernel[2](rows)
    else:
        with pytest.raises(CoreRaceError, match=r"core 1 reads bytes .* core 0 has written"):
            kernel[2](rows)


def test_an_interrupted_launch_ends_both_cores_and_the_next_one_works() -> None:
    @nki.jit
    def kernel(x: Any, forever: bool) -> Any:
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        tile = nl.load(x)
        while forever:
            nisa.tensor_copy(tile, tile)
        if nl.program_id(0) == 0:
            nisa.dma_copy(out, tile)
        return out

    before = threading.active_count()
    main = threading.get_ident()
    timer = threading.Timer(0.2, lambda: signal.pthread_kill(main, signal.SIGINT))
    # A shell starts background jobs with SIGINT ignored, and Python then leaves it so.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            kernel[2](x[:128], True)
        timer.join()
    finally:
        signal.signal(signal.SIGINT, inherited)
    assert threading.active_count() <= before
    np.testing.assert_array_equal(kernel[2](x[:128], False), x[:128])
