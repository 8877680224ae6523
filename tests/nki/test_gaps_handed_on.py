"""Instructions that hand on which elements nothing has written, and those that use them."""

from typing import Any

import numpy as np
import pytest

from segattn.reference import nki
from segattn.reference.nki.errors import UninitializedReadError
from segattn.tests.nki.half_written import X, half_written

nl, nisa = nki.language, nki.isa


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
