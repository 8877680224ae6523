"""Descriptors and engine time of DMA transfers, by hand arithmetic with the base constants."""

import pytest

from segattn.reference.nki.cost.constants import BASE
from segattn.reference.nki.cost.dma import Transfer, transfer
from segattn.reference.nki.records import Access, Dma
from segattn.tests.checks.calibration.streams import Stream, bank, hbm, part, tile


def cost(
    dst: Access,
    *reads: Access,
    opcode: str = "dma_copy",
    transpose: bool = False,
    skipped_rows: int = 0,
) -> Transfer:
    stream = Stream()
    stream.dma(opcode, 0, (dst,), reads, transpose=transpose, skipped_rows=skipped_rows)
    (record,) = stream.launches[0].records
    assert isinstance(record, Dma)
    return transfer(record, BASE)


def descriptor(nbytes: float) -> float:
    return 9 + nbytes / 24.5


def test_one_engine_serves_eight_partitions() -> None:
    moved = cost(tile(20, 64), hbm(20, 64))
    assert moved.num_descriptors == 20
    expected = [8 * descriptor(128), 8 * descriptor(128), 4 * descriptor(128)] + 13 * [0.0]
    assert moved.engine_ns == pytest.approx(expected)


def test_a_descriptor_ends_where_either_side_breaks() -> None:
    dst = tile(16, 1)._replace(shape=(16, 3, 256), strides=(1, 1024, 2))  # runs of 512 B
    src = hbm(1, 1)._replace(shape=(16, 2, 384), strides=(8192, 2048, 2))  # runs of 768 B
    assert cost(dst, src).num_descriptors == 16 * 1536 // 256


def test_scattered_elements_take_a_descriptor_each() -> None:
    moved = cost(tile(16, 64), part(hbm(16, 128), slice(0, 128, 2)))
    assert moved.num_descriptors == 16 * 64


def test_a_copy_within_hbm_uses_all_engines() -> None:
    moved = cost(hbm(1, 65536), hbm(1, 65536))
    assert moved.engine_ns == pytest.approx(16 * [descriptor(8192)])
    small = cost(hbm(1, 512), hbm(1, 512))  # 1 KiB: two pieces of 512 B
    assert small.engine_ns == pytest.approx([descriptor(512)] * 2 + [0.0] * 14)


def test_a_transpose_from_hbm_goes_row_by_row_at_nine_tenths() -> None:
    moved = cost(tile(128, 2048), hbm(2048, 128), opcode="dma_transpose", transpose=True)
    assert moved.num_descriptors == 2048
    assert moved.engine_ns == pytest.approx(16 * [128 * descriptor(256) / 0.9])


def test_a_transpose_on_chip_runs_at_a_share_of_the_documented_rate() -> None:
    rows = tile(128, 512)._replace(shape=(128, 4, 128), strides=(1, 256, 2))
    moved = cost(tile(128, 512), rows, opcode="dma_transpose", transpose=True)
    assert moved.engine_ns == pytest.approx(16 * [131072 / 16 / (0.36 * 23)])


def test_an_accumulating_dma_reads_every_source_at_half_the_rate() -> None:
    a, b = hbm(128, 512), hbm(128, 512)
    moved = cost(tile(128, 512), a, b, opcode="dma_compute")
    assert moved.engine_ns == pytest.approx(16 * [2 * 8 * descriptor(1024) / 0.5])
    assert moved.hbm_bytes == 2 * 131072


def test_a_skipped_row_costs_its_slot_and_moves_nothing() -> None:
    rows = hbm(4096, 128)._replace(indirect=True, shape=(128, 128))
    index = tile(128, 1, "int32")
    moved = cost(tile(128, 128), rows, index, skipped_rows=32)
    assert (moved.nbytes, moved.hbm_bytes) == (96 * 256, 96 * 256)
    assert moved.engine_ns == pytest.approx(16 * [8 * (9 + 0.75 * 256 / 24.5)])


def test_a_scalar_offset_that_is_out_of_bounds_moves_nothing() -> None:
    moved = cost(tile(128, 128), hbm(128, 128), tile(1, 1, "int32"), skipped_rows=128)
    assert (moved.nbytes, moved.hbm_bytes) == (0, 0)
    assert moved.engine_ns == pytest.approx(16 * [8 * 9])


def test_skipped_rows_without_an_indirect_side_are_refused() -> None:
    with pytest.raises(ValueError, match="skips 1 rows but is not indirect"):
        cost(tile(128, 128), hbm(128, 128), skipped_rows=1)


def test_an_empty_transfer_costs_nothing() -> None:
    moved = cost(tile(128, 0), hbm(128, 0))
    assert (moved.nbytes, moved.num_descriptors, moved.engine_ns.sum()) == (0, 0, 0)


def test_without_an_issuer_sync_issues_loads_and_the_scalar_engine_stores_on_two_queues() -> None:
    stream = Stream()
    for _ in range(3):
        stream.load(tile(16, 64), hbm(16, 64))
    for _ in range(2):
        stream.load(hbm(16, 64), tile(16, 64))
    result = stream.evaluate()
    issued = [(step.stream[1], step.queue) for step in result.plan.steps]
    assert issued == [
        ("sync", (0, "sync.0")),
        ("sync", (0, "sync.1")),
        ("sync", (0, "sync.0")),
        ("scalar", (0, "scalar.0")),
        ("scalar", (0, "scalar.1")),
    ]
    slot = 64 / 1.2  # the Scalar Engine goes on at once
    assert [t.start for t in result.timings] == pytest.approx([0, 600, 1200, 0, slot])


def test_the_scalar_engine_does_not_write_a_bank_that_the_vector_engine_reads() -> None:
    stream = Stream()
    both = bank(128, 512)
    left, right = part(both, slice(0, 256)), part(both, slice(256, 512))
    fp32 = "float32"
    stream.compute("vector", "tensor_copy", 0, (tile(128, 256, fp32),), (left,))
    stream.compute("scalar", "activation", 0, (right,), (tile(128, 256, fp32),), "copy")
    assert stream.evaluate().timings[1].start == pytest.approx((256 + 64) / 0.96)


def test_an_operand_of_two_banks_holds_both() -> None:
    stream = Stream()
    wide = bank(128, 1024)
    second = part(wide, slice(512, 1024))
    fp32 = "float32"
    stream.compute("vector", "tensor_copy", 0, (tile(128, 1024, fp32),), (wide,))
    stream.compute("scalar", "activation", 0, (tile(128, 512, fp32),), (second,), "copy")
    assert stream.evaluate().timings[1].start == pytest.approx((1024 + 64) / 0.96)
