"""Dtypes, memory regions, sizes, tensors and handles: the names that are no functions of tiles."""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from segattn.reference import nki
from segattn.reference.nki.errors import NkiValidationError
from segattn.tests.nki.running import floats, nisa, nl, run

TEXT: Any = "first"


def test_operators_of_other_instructions_are_names_only() -> None:
    # nl.prelu and nl.bypass are operators of activate2, which only trn3 has.
    assert len({nl.prelu, nl.bypass, nl.average, nl.add}) == 4


def test_dtypes_are_their_names_and_have_the_documented_ranges() -> None:
    assert nl.DType is str
    for dtype, largest in (
        (nl.int16, 2**15 - 1),
        (nl.float8_e4m3, 240),
        (nl.float8_e4m3fn, 448),
        (nl.float8_e5m2, 57344),
    ):
        found = run(
            lambda dst, big: nisa.tensor_copy(dst, big),
            np.array([[largest, 1]], np.float32),
            out=((1, 2), dtype),
        )
        assert [float(value) for value in found[0]] == [largest, 1]


def test_tfloat32_keeps_10_bits_and_e8m0_holds_powers_of_two() -> None:
    # 1 + 2**-10 + 2**-12 rounds to 1 + 2**-10.
    data = np.array([[1 + 2**-10 + 2**-12]], np.float32)
    found = run(lambda dst, x: nisa.tensor_copy(dst, x), data, out=((1, 1), nl.tfloat32))
    assert float(found[0, 0]) == 1 + 2**-10
    scales = np.array([[0.25, 8.0]], np.float32).astype(ml_dtypes.float8_e8m0fnu)
    found = run(lambda dst, x: nisa.dma_copy(dst, x), scales, out=((1, 2), nl.float8_e8m0fnu))
    assert found.tobytes() == scales.tobytes()


def test_memory_regions_are_told_apart() -> None:
    regions = (nl.sbuf, nl.psum, nl.hbm, nl.shared_hbm)
    assert [nl.is_sbuf(region) for region in regions] == [True, False, False, False]
    assert [nl.is_psum(region) for region in regions] == [False, True, False, False]
    assert [nl.is_on_chip(region) for region in regions] == [True, True, False, False]
    assert [nl.is_hbm(region) for region in regions] == [False, False, True, True]
    assert nl.hbm is nl.private_hbm is nl.MemoryRegion.private_hbm
    assert nl.MemoryRegion.psum is nl.psum


def test_tile_sizes_are_those_of_trn2(monkeypatch: pytest.MonkeyPatch) -> None:
    tile_size: Any = nl.tile_size
    assert (tile_size.pmax, tile_size.bn_stats_fmax) == (128, 512)
    assert (tile_size.gemm_stationary_fmax, tile_size.gemm_moving_fmax) == (128, 512)
    assert tile_size.psum_fmax == tile_size.psum_bank_fmax == 512
    assert tile_size.psum_bank_fmax_bytes == 2048
    assert tile_size.psum_num_banks == 8
    monkeypatch.setenv("NKI_DMA_TRANSPOSE_AS_PE_TRANSPOSE", "true")
    assert tile_size.psum_num_banks == 7
    # 224 KiB in each of 128 partitions, of which 208 KiB are for kernels.
    assert tile_size.sbuf_size_bytes == 28 * 2**20
    assert tile_size.sbuf_fmax_bytes == tile_size.total_available_sbuf_size == 208 * 1024
    assert tile_size.sbuf_fmax == 52 * 1024
    # The documentation gives no numbers for these two.
    assert min(tile_size.psum_min_align, tile_size.sbuf_min_align) > 0


def test_nki_objects_take_their_fields_by_name() -> None:
    class Sizes(nl.NKIObject):
        rows = 1

    assert Sizes(rows=3).rows == 3
    assert Sizes().rows == 1


def test_a_dataclass_may_have_its_own_init() -> None:
    @dataclass
    class Params(nl.NKIObject):
        rows: int
        total: int

        def __init__(self, rows: int) -> None:
            self.rows = rows
            self.total = 2 * rows

    made = Params(rows=3)
    assert (made.rows, made.total) == (3, 6)


def test_a_tensor_wraps_the_storage_of_another() -> None:
    def body(dst: Any, x: Any) -> None:
        again = nl.NkiTensor(x.shape, x.dtype, x.storage, nl.sbuf, name="again")
        nisa.tensor_copy(dst, again)

    data = floats(4, 8)
    np.testing.assert_array_equal(run(body, data), data)


def test_tensors_are_read_by_index_and_not_assigned() -> None:
    def read(dst: Any, x: Any) -> None:
        nisa.tensor_copy(dst, x.__getitem__((slice(None), slice(0, 4))))

    data = floats(4, 8)
    np.testing.assert_array_equal(run(read, data, out=((4, 4), "float32")), data[:, :4])

    def assign(dst: Any, x: Any) -> None:
        dst.__setitem__((slice(None), slice(0, 4)), x)

    with pytest.raises(NkiValidationError, match="dst"):
        run(assign, data)


def test_reinterpret_cast_and_vector_select_make_views() -> None:
    bits = floats(4, 8).view(np.uint32)
    found = run(
        lambda dst, x: nisa.tensor_copy(dst, x.reinterpret_cast(nl.float32)),
        bits,
        out=((4, 8), "float32"),
    )
    np.testing.assert_array_equal(found, bits.view(np.float32))

    @nki.jit
    def kernel(table: Any, rows: Any) -> Any:
        index = nl.load(rows)
        tile = nl.ndarray((4, 8), dtype=table.dtype)
        nisa.dma_copy(tile, table.vector_select(0, index))
        out = nl.ndarray((4, 8), dtype=table.dtype, buffer=nl.shared_hbm)
        nl.store(out, tile)
        return out

    table, rows = floats(16, 8), np.array([[3], [15], [0], [3]], np.uint32)
    np.testing.assert_array_equal(kernel(table, rows), table[rows[:, 0]])


def test_the_target_and_its_names() -> None:
    assert nisa.get_nc_version() == nisa.nc_version.gen3
    assert nisa.nc_version.gen2 < nisa.get_nc_version() < nisa.nc_version.gen4
    assert nisa.get_nc_sub_version() in (0, 1)
    assert len({nisa.dge_mode.unknown, nisa.dge_mode.none}) == 2
    assert len({nisa.reduce_cmd.idle, nisa.reduce_cmd.reset}) == 2
    assert issubclass(nisa.NkiValidationError, Exception)


def test_registers_and_instruction_handles() -> None:
    register = nisa.VirtualRegister(7)
    assert (register.state, register.frozen) == (7, False)

    def body(dst: Any, x: Any) -> None:
        first = nisa.memset(dst, 0.0)
        second = nisa.tensor_copy(dst, x)
        assert isinstance(second.depends_on(first), nisa.NkiInstruction)
        with pytest.raises(TypeError, match="no instruction handle"):
            second.depends_on(nisa.NkiInstruction(3), TEXT)

    run(body, floats(2, 4))
