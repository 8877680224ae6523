"""On-chip memory: capacity by live ranges, explicit addresses, uninitialised reads."""

from typing import Any

import numpy as np
import pytest

from segattn.reference import nki
from segattn.reference.nki.errors import (
    CapacityError,
    NkiValidationError,
    NkiWarning,
    UninitializedReadError,
)

nl, nisa = nki.language, nki.isa
KIB_FLOATS = 256


def _fill_and_add(num_tiles: int, kib: int) -> Any:
    """`num_tiles` tiles of `kib` KiB per partition, all written before the first is read."""

    @nki.jit
    def kernel() -> None:
        tiles = [nl.zeros((128, kib * KIB_FLOATS), dtype=nl.float32) for _ in range(num_tiles)]
        for tile in tiles[1:]:
            nisa.tensor_tensor(tiles[0], tiles[0], tile, nl.add)

    return kernel


def test_208_kib_of_live_sbuf_fit_and_one_tile_more_does_not() -> None:
    _fill_and_add(13, 16)()
    with pytest.raises(CapacityError, match=r"sbuf: 229376 bytes .* limit 212992; 14 tiles"):
        _fill_and_add(14, 16)()


@nki.jit
def full_kernel() -> None:
    first = nl.zeros((128, 30 * KIB_FLOATS), dtype=nl.float32)
    second = nl.zeros((128, 60 * KIB_FLOATS), dtype=nl.float32)
    third = nl.ndarray((128, 60 * KIB_FLOATS), dtype=nl.float32)
    fourth = nl.ndarray((128, 60 * KIB_FLOATS), dtype=nl.float32)
    nisa.tensor_copy(fourth, second)
    nisa.tensor_copy(third, fourth)  # 210 KiB are live here
    nisa.tensor_copy(first, first)
    nisa.tensor_copy(second, second)


def test_the_line_that_makes_the_memory_too_full_is_named() -> None:
    line = full_kernel.function.__code__.co_firstlineno + 7
    with pytest.raises(
        CapacityError,
        match=rf"215040 bytes .* 4 tiles, the largest: second .*first 30720 B .*memory.py:{line}\)",
    ):
        full_kernel()


@nki.strict(psum_bank="off")
def test_banks_count_at_every_moment_and_not_only_where_most_bytes_are_live() -> None:
    @nki.jit
    def kernel(num_tiles: int) -> None:
        tiles = [nl.zeros((128, 300), nl.float32, nl.psum) for _ in range(num_tiles)]
        for tile in tiles:
            nisa.tensor_copy(nl.ndarray((128, 300), nl.float32), tile)
        whole = nl.zeros((128, 4096), nl.float32, nl.psum)
        nisa.tensor_copy(nl.ndarray((128, 4096), nl.float32), whole)

    kernel(8)
    with pytest.raises(CapacityError, match=r"10800 bytes .* in 8 banks, 9 needed"):
        kernel(9)


def test_a_tile_stops_counting_after_its_last_use() -> None:
    @nki.jit
    def kernel() -> None:
        kept = []
        for _ in range(20):
            tile = nl.zeros((128, 16 * KIB_FLOATS), dtype=nl.float32)
            nisa.tensor_copy(tile, tile)
            kept.append(tile)

    kernel()


def test_a_tile_that_no_instruction_uses_does_not_count() -> None:
    @nki.jit
    def kernel() -> None:
        tiles = [nl.ndarray((128, 100 * KIB_FLOATS), dtype=nl.float32) for _ in range(5)]
        nisa.memset(tiles[0], 0.0)

    kernel()


@pytest.mark.parametrize(("num_tiles", "fits"), [(8, True), (9, False)])
def test_eight_psum_banks_are_live_at_once(num_tiles: int, fits: bool) -> None:
    @nki.jit
    def kernel() -> None:
        a = nl.zeros((128, 128), dtype=nl.bfloat16)
        b = nl.zeros((128, 512), dtype=nl.bfloat16)
        tiles = [nl.ndarray((128, 512), nl.float32, nl.psum) for _ in range(num_tiles)]
        for tile in tiles:
            nisa.nc_matmul(tile, a, b)
        for tile in tiles:
            nisa.tensor_copy(nl.ndarray((128, 512), nl.float32), tile)

    if fits:
        kernel()
    else:
        with pytest.raises(CapacityError, match="psum: 18432 bytes"):
            kernel()


def test_small_psum_tiles_share_a_bank() -> None:
    @nki.jit
    def kernel() -> None:
        tiles = [nl.zeros((128, 128), nl.float32, nl.psum) for _ in range(32)]
        for tile in tiles:
            nisa.tensor_copy(nl.ndarray((128, 128), nl.float32), tile)

    kernel()


def test_three_tiles_of_three_quarters_of_a_bank_need_three_banks() -> None:
    @nki.jit
    def kernel(num: Any) -> None:
        tiles = [nl.zeros((128, 384), nl.float32, nl.psum) for _ in range(num)]
        for tile in tiles:
            nisa.tensor_copy(nl.ndarray((128, 384), nl.float32), tile)

    kernel(8)
    with pytest.raises(CapacityError):
        kernel(9)


@pytest.mark.parametrize(
    ("shape", "buffer", "text"),
    [
        ((129, 4), nl.sbuf, "129 partitions; limit 128"),
        ((128, 57345), nl.sbuf, "229380 bytes per partition; limit 229376"),
        ((128, 4097), nl.psum, "16388 bytes per partition; limit 16384"),
        ((128, 0), nl.sbuf, "sizes of at least 1"),
        ((128, 4), "sbuf", "strings were removed"),
    ],
)
def test_a_tile_that_no_core_can_hold_is_refused(shape: Any, buffer: Any, text: str) -> None:
    @nki.jit
    def kernel() -> None:
        nl.ndarray(shape, dtype=nl.float32, buffer=buffer)

    with pytest.raises(NkiValidationError, match=text):
        kernel()


@pytest.mark.parametrize(
    ("buffer", "address", "error", "text"),
    [
        (nl.sbuf, (0, 224 * 1024 - 12), CapacityError, "the memory has 0..229375"),
        (nl.sbuf, (97, 0), NkiValidationError, r"partitions 97..128; the memory has 0\.\.127"),
        (nl.psum, (0, 4), NkiValidationError, "start of a bank, a multiple of 2048"),
    ],
)
def test_an_address_outside_the_memory_is_refused(
    buffer: Any, address: Any, error: Any, text: str
) -> None:
    @nki.jit
    def kernel() -> None:
        nl.ndarray((32, 4), dtype=nl.float32, buffer=buffer, address=address)

    with pytest.raises(error, match=text):
        kernel()


def test_an_address_above_208_kib_warns() -> None:
    @nki.jit
    def kernel(byte: Any) -> None:
        nl.ndarray((128, 4), dtype=nl.float32, address=(0, byte))

    kernel(208 * 1024 - 16)
    with pytest.warns(NkiWarning, match="AWS's allocators use only 212992 bytes"):
        kernel(208 * 1024 - 12)


@nki.jit
def half_written_kernel() -> Any:
    out = nl.ndarray((128, 8), dtype=nl.float32, buffer=nl.shared_hbm)
    tile = nl.ndarray((128, 8), dtype=nl.float32, name="tile")
    nisa.memset(tile[:, 0:6], 1.0)
    nisa.tensor_copy(tile[:, 0:3], tile[:, 3:6])
    nisa.tensor_scalar(tile, tile, nl.add, 1.0)  # the line that reads
    nisa.dma_copy(out, tile)
    return out


def test_an_uninitialised_read_is_reported_at_the_line_that_reads() -> None:
    line = half_written_kernel.function.__code__.co_firstlineno + 6
    with pytest.raises(
        UninitializedReadError,
        match=rf"operand data 'tile' .* 256 of 1024 elements .* first at \(0, 6\).*:{line}\)",
    ):
        half_written_kernel()


def test_uninitialised_floats_read_as_nan_when_the_rule_is_off() -> None:
    with nki.strict(uninitialized_read="off"):
        got = half_written_kernel()
    np.testing.assert_array_equal(got[:, :6], 2.0)
    assert np.isnan(got[:, 6:]).all()


@nki.strict(partial_output="off")
def test_unwritten_parts_of_an_output_come_back_as_nan_and_four() -> None:
    @nki.jit
    def kernel() -> Any:
        outs = tuple(
            nl.ndarray((4, 2), dtype=dtype, buffer=nl.shared_hbm)
            for dtype in (nl.float32, nl.int32)
        )
        for out in outs:
            nisa.dma_copy(out[0:1], nl.zeros((1, 2), dtype=out.dtype))
        return outs

    floats, integers = kernel()
    np.testing.assert_array_equal(floats[1:], np.full((3, 2), np.nan))
    np.testing.assert_array_equal(integers, [[0, 0]] + [[4, 4]] * 3)


@nki.strict(partial_output="off")
def test_an_output_that_nothing_wrote_is_reported_where_the_kernel_ends() -> None:
    @nki.jit
    def kernel(num_rows: int) -> Any:
        out = nl.ndarray((4, 2), dtype=nl.float32, buffer=nl.shared_hbm)
        for row in range(num_rows):
            nisa.dma_copy(out[row : row + 1], nl.zeros((1, 2), dtype=nl.float32))
        return out

    with pytest.raises(UninitializedReadError, match="nothing wrote the kernel output 'out'"):
        kernel(0)
    with nki.strict(uninitialized_read="off"):
        assert np.isnan(kernel(0)).all()
    np.testing.assert_array_equal(kernel(1)[0], 0.0)


def test_a_kernel_output_must_be_in_shared_hbm() -> None:
    @nki.jit
    def kernel(buffer: Any) -> Any:
        return nl.zeros((4, 4), dtype=nl.float32, buffer=buffer)

    kernel(nl.shared_hbm)
    for buffer in (nl.hbm, nl.sbuf):
        with pytest.raises(NkiValidationError, match="outputs must be allocated with"):
            kernel(buffer)
