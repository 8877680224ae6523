"""Rules that hold for every compute instruction: partitions, buffers, engines, patterns."""

import inspect
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from segattn.reference import nki
from segattn.reference.nki.errors import NkiValidationError, NkiWarning
from segattn.tests.nki.running import floats, run

nl, nisa = nki.language, nki.isa


@nki.jit
def start_kernel(first: Any, num: Any) -> None:
    tile = nl.zeros((128, 4), dtype=nl.float32)
    nisa.tensor_scalar(tile[nl.ds(first, num)], tile[nl.ds(first, num)], nl.add, 1.0)


@pytest.mark.parametrize(
    ("num", "allowed"),
    [(1, {0, 32, 64, 96}), (32, {0, 32, 64, 96}), (33, {0, 64}), (64, {0, 64}), (65, {0})],
)
def test_the_start_partition_depends_on_the_partition_count(num: int, allowed: set[int]) -> None:
    for first in range(0, 129 - num, 16):
        if first in allowed:
            start_kernel(first, num)
        else:
            with pytest.raises(NkiValidationError, match=f"from partition {first}; allowed start"):
                start_kernel(first, num)


def test_a_rule_at_warn_warns_at_the_kernel_line_and_goes_on() -> None:
    with nki.strict(start_partition="warn"), pytest.warns(NkiWarning) as caught:
        start_kernel(16, 4)
    line = start_kernel.function.__code__.co_firstlineno + 3
    assert {(str(w.filename), w.lineno) for w in caught} == {(__file__, line)}


def test_levels_are_those_of_the_launching_thread_on_every_core() -> None:
    with nki.strict(start_partition="off"):
        start_kernel[2](16, 4)
        nki.run_ranks(start_kernel, [(16, 4), (16, 4)])
        with ThreadPoolExecutor(1) as pool:
            refused = pool.submit(start_kernel, 16, 4).exception()
    assert isinstance(refused, NkiValidationError)


def test_threads_may_leave_their_levels_in_any_order() -> None:
    entered, left = threading.Event(), threading.Event()

    def outlives() -> nki.Level:
        with nki.strict(start_partition="off"):
            entered.set()
            assert left.wait(60)
        return nki.level("start_partition")

    with ThreadPoolExecutor(1) as pool:
        with nki.strict(start_partition="warn"):
            after = pool.submit(outlives)
            assert entered.wait(60)
        left.set()
        assert after.result() == "error"
    assert nki.level("start_partition") == "error"


def test_an_unknown_rule_or_level_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown rule 'capacty'"), nki.strict(capacty="off"):
        pass
    level: Any = "ignore"
    with pytest.raises(ValueError, match="allowed: error, warn, off"), nki.strict(capacity=level):
        pass


def test_dma_may_start_at_any_partition() -> None:
    @nki.jit
    def kernel(x: Any) -> Any:
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        tile = nl.ndarray((128, 4), dtype=x.dtype)
        nisa.dma_copy(tile[17:25], x)
        nisa.dma_copy(out, tile[17:25])
        return out

    x = floats(8, 4)
    np.testing.assert_array_equal(kernel(x), x)


def _two_tiles(instruction: Any, first: Any, second: Any) -> None:
    """Run an instruction on two [128, 8] tiles in the given buffers."""

    @nki.jit
    def kernel() -> None:
        a = nl.zeros((128, 8), dtype=nl.float32, buffer=first)
        b = nl.zeros((128, 8), dtype=nl.float32, buffer=second)
        instruction(nl.ndarray((128, 8), dtype=nl.float32), a, b)

    kernel()


@pytest.mark.parametrize(
    "instruction",
    [
        lambda d, a, b: nisa.tensor_tensor(d, a, b, nl.add),
        lambda d, a, b: nisa.scalar_tensor_tensor(d, a, nl.add, 1.0, nl.add, b),
        lambda d, a, b: nisa.tensor_tensor_scan(d, a, b, 0.0, nl.multiply, nl.add),
    ],
)
def test_two_tile_operands_are_not_both_in_psum(instruction: Any) -> None:
    for first, second in ((nl.sbuf, nl.psum), (nl.psum, nl.sbuf), (nl.sbuf, nl.sbuf)):
        _two_tiles(instruction, first, second)
    with pytest.raises(NkiValidationError, match="are both in PSUM; at most one may be"):
        _two_tiles(instruction, nl.psum, nl.psum)


@pytest.mark.parametrize(
    ("instruction", "text"),
    [
        (
            lambda d, a, b: nisa.tensor_copy(d, a, engine=nisa.engine.gpsimd),
            "GpSimd cannot access PSUM",
        ),
        (lambda d, a, b: nisa.tensor_tensor(d, a, b, nl.power), "GpSimd cannot access PSUM"),
        (
            lambda d, a, b: nisa.affine_select(d, [[1, 8]], 0, a, 0.0),
            "operand on_true_tile .* is in psum; allowed: sbuf",
        ),
        (lambda d, a, b: nisa.iota(a, [[1, 8]]), "operand dst .* is in psum; allowed: sbuf"),
        (lambda d, a, b: nisa.dma_copy(d, a), r"is in psum; allowed: HBM, SBUF; evict it"),
        (
            lambda d, a, b: nisa.memset(a, 0.0, engine=nisa.engine.gpsimd),
            "GpSimd cannot access PSUM",
        ),
    ],
)
def test_gpsimd_and_dma_do_not_reach_psum(instruction: Any, text: str) -> None:
    _two_tiles(instruction, nl.sbuf, nl.sbuf)
    with pytest.raises(NkiValidationError, match=text):
        _two_tiles(instruction, nl.psum, nl.sbuf)


def test_compute_instructions_do_not_read_hbm() -> None:
    @nki.jit
    def kernel(x: Any) -> None:
        nisa.tensor_copy(nl.ndarray(x.shape, dtype=x.dtype), x)

    with pytest.raises(NkiValidationError, match="operand src 'x' is in shared_hbm; allowed: psum"):
        kernel(floats(4, 4))


def test_a_pattern_has_at_most_four_free_dimensions() -> None:
    @nki.jit
    def kernel(dims: Any) -> None:
        tile = nl.zeros((4, 3**5), dtype=nl.float32)
        strides = [1, 3, 9, 27, 81]
        pattern = [[3**5, 4]] + [[s, 2] for s in reversed(strides[5 - dims :])]
        out = nl.ndarray((4, 2**dims), dtype=nl.float32)
        nisa.tensor_copy(out, tile.ap(pattern))

    kernel(4)
    with (
        nki.strict(tile_rank="off"),
        pytest.raises(NkiValidationError, match="needs 5 free dimensions; limit 4"),
    ):
        kernel(5)


@nki.strict(psum_bank="off")
def test_psum_patterns_hold_4096_elements_and_all_patterns_65535() -> None:
    @nki.jit
    def in_psum(num: int) -> None:
        tile = nl.ndarray((1, 8192), dtype=nl.bfloat16, buffer=nl.psum)
        nisa.memset(tile[:, :num], 1.0)

    in_psum(4096)
    with pytest.raises(NkiValidationError, match="4097 elements per partition; limit 4096 in psum"):
        in_psum(4097)

    def repeated(d: Any, a: Any, num: int) -> None:
        nisa.tensor_reduce(d[:, 0:1], nl.add, a.ap([[8, 128], [0, num], [1, 8]]), (1, 2))

    for buffer in (nl.psum, nl.sbuf):
        _two_tiles(lambda d, a, b: repeated(d, a, 8191), buffer, nl.sbuf)
        with pytest.raises(NkiValidationError, match="65536 elements per partition; limit 65535"):
            _two_tiles(lambda d, a, b: repeated(d, a, 8192), buffer, nl.sbuf)


@pytest.mark.parametrize(
    "name", ["nc_matmul_mx", "quantize_mx", "activate2", "exponential", "rand2"]
)
def test_instructions_of_trn3_say_so(name: str) -> None:
    instruction = getattr(nisa, name)
    parameters = inspect.signature(instruction).parameters.values()
    num = sum(p.default is p.empty for p in parameters)
    with pytest.raises(NkiValidationError, match=rf"nisa\.{name} exists on trn3"):
        instruction(*[None] * num)
    with pytest.raises(NkiValidationError, match=rf"nisa\.{name} exists on trn3"):
        instruction(no_parameter=1)  # before its arguments are looked at


def test_a_kernel_that_calls_an_instruction_of_trn3_is_told_so_before_its_arguments() -> None:
    @nki.jit
    def kernel(x: Any) -> Any:
        tile = nl.load(x)
        nisa.activate2(dst=tile)
        return x

    with pytest.raises(NkiValidationError, match=r"nisa\.activate2 exists on trn3"):
        kernel(floats(4, 4))


def test_tensor_indirection_and_packed_dtypes_of_trn3_say_so() -> None:
    def indirect(dst: Any, a: Any) -> None:
        a.indirect(a)

    with pytest.raises(NkiValidationError, match=r"indirect exists on trn3"):
        run(indirect, floats(4, 4))
    with pytest.raises(NkiValidationError, match="float8_e5m2_x4 exists on trn3 only"):
        run(lambda dst: nl.ndarray((4, 4), nl.float8_e5m2_x4), out=((4, 4), "float32"))


@pytest.mark.parametrize("name", ["divide", "mod", "fmod"])
def test_operators_that_the_device_lacks_are_refused(name: str) -> None:
    with pytest.raises(NkiValidationError, match=rf"nl\.{name} does not exist on the device"):
        getattr(nl, name)(1, 2)
