"""Copies and transposes of tiles of which only a part was written."""

from typing import Any

import numpy as np
import pytest

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


def test_a_gap_that_lands_on_written_elements_is_reported_where_it_is_copied() -> None:
    @nki.jit
    def kernel(x: Any) -> Any:
        copied = nl.ndarray((32, 32), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(copied, 0.0)
        nisa.tensor_copy(copied, half_written(x))
        return x

    with pytest.raises(UninitializedReadError, match=r"tensor_copy.*512 of 1024"):
        kernel(X)


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
