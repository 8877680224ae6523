"""Instructions on tiles of which only a part was written."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segattn.reference import nki
from segattn.reference.nki.errors import UninitializedReadError
from segattn.tests.nki.half_written import X, half_written

nl, nisa = nki.language, nki.isa


def turned_by_matmul(tile: Any) -> Any:
    identity = nl.shared_identity_matrix(32, dtype=nl.float32)
    turned = nl.ndarray((32, 32), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(turned, tile, identity, is_transpose=True)
    return turned


def turned_by_transpose(tile: Any) -> Any:
    turned = nl.ndarray((32, 32), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(turned, tile, engine=nisa.engine.tensor)
    return turned


@pytest.mark.parametrize("turn", [turned_by_matmul, turned_by_transpose])
@pytest.mark.parametrize("rows", [16, 17])
def test_a_gap_may_be_moved_but_not_used(turn: Any, rows: int) -> None:
    @nki.jit
    def kernel(x: Any) -> Any:
        copied = nl.ndarray((32, 32), dtype=nl.bfloat16, buffer=nl.sbuf)
        nisa.tensor_copy(copied, turn(half_written(x)))
        used = nl.ndarray((rows, 32), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(used, copied[:rows], op0=nl.multiply, operand0=1.0)
        result = nl.ndarray((rows, 32), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(result, used)
        return result

    x = X % 256  # exact in bfloat16
    if rows == 16:
        np.testing.assert_array_equal(kernel(x), x.T)
    else:
        with pytest.raises(UninitializedReadError, match=r"tensor_scalar.*32 of 544.*\(16, 0\)"):
            kernel(x)


def test_a_gap_does_not_leave_the_chip() -> None:
    @nki.jit
    def kernel(x: Any) -> Any:
        copied = nl.ndarray((32, 32), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(copied, half_written(x))
        result = nl.ndarray((32, 32), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(result, copied)
        return result

    with pytest.raises(UninitializedReadError, match=r"dma_copy.*512 of 1024"):
        kernel(X)


def test_a_tile_without_any_written_element_is_reported_where_it_is_copied() -> None:
    @nki.jit
    def kernel(x: Any) -> Any:
        copied = nl.ndarray((32, 16), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(copied, half_written(x)[:, 16:])
        return x

    with pytest.raises(UninitializedReadError, match=r"tensor_copy.*512 of 512"):
        kernel(X)


@pytest.mark.parametrize("computed", [True, False])
def test_a_gap_that_lands_on_written_elements_undoes_them(computed: bool) -> None:
    @nki.jit
    def kernel(x: Any, columns: int, computed: bool) -> Any:
        tile, other = half_written(x), nl.zeros((32, 32), dtype=nl.float32, name="other")
        if computed:
            nisa.tensor_scalar(other, tile, nl.add, 1.0)
        else:
            nisa.tensor_copy(other, tile)
        result = nl.ndarray((32, columns), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(result, other[:, :columns])
        return result

    np.testing.assert_array_equal(kernel(X, 16, computed), X + computed)
    reader = r"tensor_scalar.* and nisa.dma_copy" if computed else r"dma_copy: operand src 'other'"
    with pytest.raises(UninitializedReadError, match=reader):
        kernel(X, 17, computed)


def test_counting_and_shuffling_leave_partitions_alone_that_nothing_wrote() -> None:
    @nki.jit
    def kernel(x: Any, used: int) -> Any:
        source = nl.ndarray((128, 16), dtype=nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst=source[16:17], src=x[1:2])
        counted = nl.ndarray((128, 17), dtype=nl.int32, buffer=nl.sbuf)
        nisa.nonzero_with_count(counted, source)
        nisa.nc_stream_shuffle(counted, counted, [16] + [255] * 31)
        result = nl.ndarray((1, 17), dtype=nl.int32, buffer=nl.shared_hbm)
        nisa.dma_copy(result, counted[used : used + 1])
        return result

    x = np.zeros((2, 16), np.float32)
    x[1, [3, 5]] = 1.0
    expected = [[3, 5, *[-1] * 14, 2]]
    np.testing.assert_array_equal(kernel(x, 0), expected)
    with pytest.raises(UninitializedReadError, match=r"dma_copy.*17 of 17"):
        kernel(x, 32)


def test_counting_a_partly_written_partition_is_reported() -> None:
    @nki.jit
    def kernel(x: Any) -> Any:
        counted = nl.ndarray((32, 33), dtype=nl.int32, buffer=nl.sbuf)
        nisa.nonzero_with_count(counted, half_written(x))
        return x

    with pytest.raises(UninitializedReadError, match=r"nonzero_with_count.*16 of 32"):
        kernel(X)


def _add(out: Any, tile: Any) -> None:
    nisa.tensor_scalar(out, tile, nl.add, 1.0)


def _double(out: Any, tile: Any) -> None:
    nisa.tensor_tensor(out, tile, tile, nl.add)


def _square(out: Any, tile: Any) -> None:
    nisa.activation(out, nl.square, tile)


def _blend(out: Any, tile: Any) -> None:
    nisa.scalar_tensor_tensor(out, tile, nl.multiply, 2.0, nl.add, tile)


def _invert(out: Any, tile: Any) -> None:
    nisa.reciprocal(out, tile)


def _copy(out: Any, tile: Any) -> None:
    nisa.tensor_copy(out, tile)


STEPS = (_add, _double, _square, _blend, _invert, _copy)


@given(
    written=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4)), min_size=1, max_size=3),
    steps=st.lists(st.tuples(st.sampled_from(STEPS), st.booleans()), max_size=4),
    refilled=st.integers(0, 8),
    stored=st.tuples(st.integers(0, 7), st.integers(1, 8)),
)
def test_a_computed_gap_is_reported_exactly_when_it_leaves_the_chip(
    written: Any, steps: Any, refilled: int, stored: tuple[int, int]
) -> None:
    @nki.jit
    def kernel(x: Any, written: Any, steps: Any, refilled: int, first: int, end: int) -> Any:
        tile = nl.ndarray((4, 8), dtype=nl.float32)
        for start, num in written:
            end_of_part = min(start + num, 8)
            nisa.dma_copy(tile[:, start:end_of_part], x[:, start:end_of_part])
        for step, in_place in steps:
            out = tile if in_place else nl.ndarray((4, 8), dtype=nl.float32)
            step(out, tile)
            tile = out
        if refilled:
            nisa.memset(tile[:, :refilled], 3.0)
        result = nl.ndarray((4, end - first), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(result, tile[:, first:end])
        return result

    first, end = stored[0], min(stored[0] + stored[1], 8)
    state = np.zeros(8, np.bool_)
    for start, num in written:
        state[start : start + num] = True
    state[:refilled] = True
    with nki.strict(purity="off"):
        arguments = (np.ones((4, 8), np.float32), written, steps, refilled, first, end)
        if state[first:end].all():
            assert np.isfinite(kernel(*arguments)).all()
        else:
            with pytest.raises(UninitializedReadError):
                kernel(*arguments)
