"""Instructions on tiles of which only a part was written."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segattn.reference import nki
from segattn.reference.nki.errors import UninitializedReadError

nl, nisa = nki.language, nki.isa


def half_written(x: Any) -> Any:
    """A [32, 32] tile whose first 16 columns hold x [32, 16]."""
    tile = nl.ndarray((32, 32), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile[:, :16], src=x)
    return tile


def turned_by_matmul(tile: Any) -> Any:
    identity = nl.shared_identity_matrix(32, dtype=nl.float32)
    turned = nl.ndarray((32, 32), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(turned, tile, identity, is_transpose=True)
    return turned


def turned_by_transpose(tile: Any) -> Any:
    turned = nl.ndarray((32, 32), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(turned, tile, engine=nisa.engine.tensor)
    return turned


X = np.arange(512, dtype=np.float32).reshape(32, 16)


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
            nisa.dma_copy(tile[:, start : start + num], x[:, start : start + num])
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
    with nki.strict(subset="off"):
        arguments = (np.ones((4, 8), np.float32), written, steps, refilled, first, end)
        if state[first:end].all():
            assert np.isfinite(kernel(*arguments)).all()
        else:
            with pytest.raises(UninitializedReadError):
                kernel(*arguments)


@nki.jit
def gap_kernel(x: Any) -> Any:
    tile = half_written(x)
    other = nl.ndarray((32, 32), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(other, nl.square, tile)  # the line that reads
    nisa.tensor_scalar(other, other, nl.add, 1.0)
    sums = nl.ndarray((32, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(sums, nl.add, other, axis=1)  # the line that uses the result
    return x


def test_a_used_gap_names_the_line_that_read_it_first_and_the_one_that_uses_it() -> None:
    first = gap_kernel.function.__code__.co_firstlineno + 4
    with pytest.raises(
        UninitializedReadError,
        match=rf"activation: operand data 'tile' .*512 of 1024.*\(0, 16\), and nisa.tensor_reduce "
        rf"\(at .*:{first + 3}\) uses the result; .*:{first}\) \[rule",
    ):
        gap_kernel(X)


def test_a_tile_without_any_written_element_is_reported_where_it_is_computed_with() -> None:
    @nki.jit
    def kernel(x: Any) -> Any:
        tile, other = (nl.ndarray((32, 32), dtype=nl.float32) for _ in range(2))
        nisa.tensor_scalar(other, tile, nl.add, 1.0)
        return x

    with pytest.raises(
        UninitializedReadError, match=r"tensor_scalar: operand data .* 1024 of 1024"
    ):
        kernel(X)


def test_gathering_hands_on_which_elements_nothing_has_written() -> None:
    @nki.jit
    def kernel(x: Any, rows: int) -> Any:
        source = nl.ndarray((32, 16), dtype=nl.float32)
        nisa.dma_copy(source[:8], x[:8])
        index = nl.zeros((32, 1), dtype=nl.uint16)
        gathered = nl.zeros((32, 16), dtype=nl.float32)
        nisa.local_gather(gathered, source, index)
        result = nl.ndarray((rows, 16), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(result, gathered[:rows])
        return result

    np.testing.assert_array_equal(kernel(X, 8), np.repeat(X[:8, :1], 16, axis=1))
    with pytest.raises(UninitializedReadError, match=r"dma_copy: operand src 'gathered'"):
        kernel(X, 9)


def _masked_affine(out: Any, tile: Any, keep: int) -> None:
    nisa.affine_select(out, [[-1, 32]], 0, tile, -1.0, nl.greater, offset=keep)


def _masked_range(out: Any, tile: Any, keep: int) -> None:
    low, high = (nl.full((32, 1), v, dtype=nl.float32) for v in (0, keep))
    nisa.range_select(out, tile, nl.greater_equal, nl.less, low, high)


def _masked_select(out: Any, tile: Any, keep: int) -> None:
    mask = nl.zeros((32, 32), dtype=nl.uint8)
    nisa.memset(mask[:, :keep], 1)
    nisa.select_reduce(out, mask, tile, -1.0)


def _masked_copy(out: Any, tile: Any, keep: int) -> None:
    mask = nl.zeros((32, 32), dtype=nl.uint8)
    nisa.memset(mask[:, :keep], 1)
    nisa.memset(out, -1.0)
    nisa.tensor_copy_predicated(out, tile, mask)


@pytest.mark.parametrize("select", [_masked_affine, _masked_range, _masked_select, _masked_copy])
def test_a_select_reads_only_what_it_keeps(select: Any) -> None:
    @nki.jit
    def kernel(x: Any, keep: int) -> Any:
        out = nl.ndarray((32, 32), dtype=nl.float32)
        select(out, half_written(x), keep)
        result = nl.ndarray((32, 32), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(result, out)
        return result

    got = kernel(X, 16)
    np.testing.assert_array_equal(got[:, :16], X)
    assert (got[:, 16:] < 0).all()
    with pytest.raises(UninitializedReadError, match=r"32 of 1024.*first at \(0, 16\)"):
        kernel(X, 17)


def _row_sum(out: Any, tile: Any) -> None:
    nisa.tensor_reduce(out, nl.add, tile, axis=1)


def _activation_sum(out: Any, tile: Any) -> None:
    scratch = nl.ndarray(tile.shape, dtype=nl.float32)
    nisa.activation_reduce(scratch, nl.copy, tile, nl.add, out)


def _scalar_sum(out: Any, tile: Any) -> None:
    scratch = nl.ndarray(tile.shape, dtype=nl.float32)
    nisa.tensor_scalar_reduce(scratch, tile, nl.add, 0.0, nl.add, out)


@pytest.mark.parametrize("reduce", [_row_sum, _activation_sum, _scalar_sum])
def test_a_reduction_hands_on_partitions_of_which_nothing_is_written(reduce: Any) -> None:
    @nki.jit
    def kernel(x: Any, rows: int, used: int, columns: int) -> Any:
        tile = nl.ndarray((32, 16), dtype=nl.float32)
        nisa.dma_copy(tile[:rows, :columns], x[:rows, :columns])
        sums = nl.ndarray((32, 1), dtype=nl.float32)
        reduce(sums, tile)
        result = nl.ndarray((used, 1), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(result, sums[:used])
        return result

    np.testing.assert_array_equal(kernel(X, 20, 20, 16), X[:20].sum(axis=1, keepdims=True))
    with pytest.raises(UninitializedReadError, match=r"192 of 512.*and nisa.dma_copy .* uses the"):
        kernel(X, 20, 21, 16)
    with pytest.raises(UninitializedReadError, match=r"nisa.(tensor|act).* 212 of 512"):
        kernel(X, 20, 20, 15)


def test_a_column_operand_hands_on_its_gaps() -> None:
    @nki.jit
    def kernel(x: Any, used: int) -> Any:
        tile = nl.load(x)
        column = nl.ndarray((32, 1), dtype=nl.float32)
        nisa.dma_copy(column[:20], x[:20, 0:1])
        nisa.tensor_scalar(tile, tile, nl.add, column)
        result = nl.ndarray((used, 16), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(result, tile[:used])
        return result

    np.testing.assert_array_equal(kernel(X, 20), X[:20] + X[:20, 0:1])
    with pytest.raises(UninitializedReadError, match=r"operand operand0 'column' .*12 of 32"):
        kernel(X, 21)


def test_an_unwritten_predicate_leaves_undefined_elements() -> None:
    @nki.jit
    def kernel(x: Any, used: int) -> Any:
        tile = nl.zeros((32, 16), dtype=nl.float32)
        mask = nl.ndarray((32, 16), dtype=nl.uint8)
        nisa.memset(mask[:, :8], 1)
        nisa.tensor_copy_predicated(tile, nl.load(x), mask)
        result = nl.ndarray((32, used), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(result, tile[:, :used])
        return result

    np.testing.assert_array_equal(kernel(X, 8), X[:, :8])
    with pytest.raises(UninitializedReadError, match=r"operand predicate 'mask' .*256 of 512"):
        kernel(X, 9)


@pytest.mark.parametrize("keep", [False, True])
def test_a_shuffle_hands_on_unwritten_partitions(keep: bool) -> None:
    @nki.jit
    def kernel(x: Any, used: int, mask: Any) -> Any:
        tile = nl.ndarray((32, 16), dtype=nl.float32)
        turned = nl.zeros((32, 16), dtype=nl.float32)
        nisa.dma_copy(tile[:20], x[:20])
        nisa.nc_stream_shuffle(turned, tile, mask)
        result = nl.ndarray((used, 16), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(result, turned[:used])
        return result

    mask = [255 if keep and p == 3 else (p + 4) % 32 for p in range(32)]
    expected = np.where(np.arange(16)[:, None] == 3 if keep else False, 0, X[4:20])
    np.testing.assert_array_equal(kernel(X, 16, tuple(mask)), expected)
    with pytest.raises(UninitializedReadError, match=r"dma_copy: operand src 'turned' .*16 of 272"):
        kernel(X, 17, tuple(mask))
