"""Launches of several threads, interrupts, and what is said about where a launch stopped."""

import threading
from typing import Any

import numpy as np
import pytest

from segattn.reference import nki
from segattn.reference.nki.errors import DeadlockError

# the tests pass wrong arguments on purpose
nl: Any = nki.language
nisa: Any = nki.isa


@nki.jit
def halves_kernel(x: Any, factor: float) -> Any:
    """X * factor, each core its half of the rows."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    cores = nl.num_programs(0)
    rows = x.shape[0] // cores
    tile = nl.load(x[nl.program_id(0) * rows : (nl.program_id(0) + 1) * rows])
    for _ in range(20):
        nisa.tensor_scalar(tile, tile, nl.add, 0.0)
    nisa.tensor_scalar(tile, tile, nl.multiply, factor)
    nisa.dma_copy(out[nl.program_id(0) * rows : (nl.program_id(0) + 1) * rows], tile)
    return out


def test_threads_launch_kernels_side_by_side() -> None:
    x = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
    wrong: list[object] = []

    def work(index: int) -> None:
        try:
            for _ in range(15):
                kernel = halves_kernel[2] if index % 2 else halves_kernel
                if not np.array_equal(kernel(x.copy(), float(index)), x * np.float32(index)):
                    wrong.append(index)
        except Exception as error:  # a thread's exception would be lost
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("started", [False, True])
def test_an_interrupt_while_the_cores_start_leaves_no_thread(
    at: int, started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.ones((4, 4), np.float32)
    before = threading.active_count()
    calls: list[int] = []
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        calls.append(1)
        if len(calls) == at + 1 and not started:
            raise KeyboardInterrupt
        start(thread)
        if len(calls) == at + 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        halves_kernel[2](x, 2.0)
    monkeypatch.undo()
    assert threading.active_count() == before
    np.testing.assert_array_equal(halves_kernel[2](x, 2.0), 2 * x)


def test_a_deadlock_names_the_line_that_waits() -> None:
    @nki.jit
    def kernel(x: Any) -> Any:
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        if nl.program_id(0) == 0:
            nisa.core_barrier(out, (0, 1))
        return out

    text = r"core 0 waits for core_barrier number 0 \(at .*test_launch_state.py:\d+\), but core 1"
    with pytest.raises(DeadlockError, match=text):
        kernel[2](np.ones((4, 4), np.float32))


def test_a_misspelt_keyword_is_reported_with_the_line() -> None:
    @nki.jit
    def kernel() -> None:
        nisa.memset(nl.ndarray((2, 2), dtype=nl.float32), 0.0, engin=1)

    with pytest.raises(TypeError, match=r"'engin': use engine= \(at .*test_launch_state.py:\d+\)"):
        kernel()


@pytest.mark.parametrize("level", ["warn", "off"])
@pytest.mark.filterwarnings("ignore::segattn.reference.nki.errors.NkiWarning")
def test_an_undefined_accumulation_passes_below_error_and_is_undefined(level: Any) -> None:
    @nki.jit
    def kernel(x: Any) -> Any:
        out = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.shared_hbm)
        sums = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(sums, nl.load(x), nl.load(x), accumulate=True)
        nisa.dma_copy(out, nl.copy(sums))
        return out

    with nki.strict(psum_accumulation=level):
        assert np.isnan(kernel(np.ones((4, 4), np.float32))).all()


def test_a_print_of_a_tile_marks_what_nothing_wrote(capsys: pytest.CaptureFixture[str]) -> None:
    @nki.jit
    def kernel() -> None:
        tile = nl.ndarray((1, 3), dtype=nl.float32)
        nisa.memset(tile[:, 0:2], 7.0)
        nl.device_print("tile", tile)

    kernel()
    assert capsys.readouterr().out == "tile [[7.0 7.0 --]]\n"


def test_tiles_of_two_statements_on_a_line_have_no_name() -> None:
    @nki.jit
    def kernel() -> Any:
        one = nl.ndarray((1, 1), dtype=nl.float32)
        make = nl.ndarray
        a = make((1, 1), nl.float32); b = make((1, 1), nl.float32)  # fmt: skip  # noqa: E702  # tested
        return [one.name, a.name, b.name]

    assert kernel() == ["one", "", ""]
