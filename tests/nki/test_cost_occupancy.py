"""Engine time per instruction against hand arithmetic from the documented rules."""

import pytest

from segattn.reference.nki.cost.constants import BASE, CostConstants
from segattn.reference.nki.cost.occupancy import Occupancy, occupancy
from segattn.reference.nki.records import Access, Engine, Instruction
from segattn.tests.checks.calibration.streams import Stream, bank, part, tile

FP32 = "float32"
HALF = "bfloat16"


def cost(
    engine: Engine, opcode: str, dst: Access, *reads: Access, op: str = "", c: CostConstants = BASE
) -> Occupancy:
    stream = Stream()
    stream.compute(engine, opcode, 0, (dst,), reads, op)
    (record,) = stream.launches[0].records
    assert isinstance(record, Instruction)
    return occupancy(record, c)


def matmul(
    k: int, m: int, n: int, dtype: str = HALF, perf_mode: str = "none", is_transpose: bool = False
) -> float:
    stream = Stream()
    operands = tile(k, m, dtype), tile(k, n, dtype)
    stream.matmul(0, bank(m, n), *operands, perf_mode, is_transpose)
    (record,) = stream.launches[0].records
    assert isinstance(record, Instruction)
    return occupancy(record, BASE).busy * BASE.tensor_ghz


def test_a_matmul_streams_its_moving_columns_but_not_faster_than_64_cycles() -> None:
    assert matmul(128, 128, 512) == pytest.approx(512)
    assert matmul(128, 128, 129) == pytest.approx(129)
    assert matmul(64, 128, 16) == pytest.approx(64)
    assert matmul(128, 32, 16) == pytest.approx(32)


def test_fp32_takes_four_passes_and_two_as_a_transpose() -> None:
    assert matmul(128, 128, 512, FP32) == pytest.approx(2048)
    assert matmul(128, 128, 128, FP32, is_transpose=True) == pytest.approx(256)


def test_double_row_contracts_256_rows_in_the_time_of_128() -> None:
    # The operands hold two contraction rows per partition: [128, 2, M] and [128, 2, N].
    assert matmul(128, 256, 1024, "float8_e4m3", perf_mode="double_row") == pytest.approx(512)


def test_a_pe_transpose_moves_the_identity_past_the_data() -> None:
    dst = bank(128, 128, HALF)
    cycles = cost("tensor", "nc_transpose", dst, tile(128, 128)).busy * BASE.tensor_ghz
    assert cycles == pytest.approx(128)


@pytest.mark.parametrize(
    ("dst", "src", "cycles"),
    [
        (tile(128, 512, HALF), tile(128, 512, HALF), 512 / 4 + 64),
        (tile(128, 512, HALF), tile(128, 512, "float16"), 512 / 4 + 64),
        (tile(128, 512, HALF), part(tile(128, 1024, HALF), slice(0, 1024, 2)), 512 / 2 + 64),
        (tile(128, 512, HALF), bank(128, 512, HALF), 512 / 2 + 64),
        (tile(128, 512, HALF), bank(128, 512, FP32), 512 + 64),
        (tile(128, 512, FP32), tile(128, 512, FP32), 512 + 64),
        (tile(128, 512, FP32), tile(128, 512, HALF), 512 + 64),
    ],
)
def test_vector_copies_run_up_to_four_times_faster_on_16_bit_data(
    dst: Access, src: Access, cycles: float
) -> None:
    assert cost("vector", "tensor_copy", dst, src).busy * 0.96 == pytest.approx(cycles)


def test_fast_modes_and_gpsimd_share_a_port_and_others_do_not() -> None:
    assert cost("vector", "tensor_copy", tile(128, 512), tile(128, 512)).shares_port
    assert not cost("vector", "tensor_copy", tile(128, 512, FP32), tile(128, 512, FP32)).shares_port
    assert cost("gpsimd", "iota", tile(128, 512, FP32)).shares_port
    assert not cost("scalar", "activation", tile(128, 512), tile(128, 512), op="exp").shares_port


def test_two_sbuf_inputs_cost_twice_unless_one_is_in_psum_or_all_are_16_bit() -> None:
    a, b = tile(128, 129, FP32), tile(128, 129, FP32)

    def add(dst: Access, a: Access, b: Access) -> float:
        return cost("vector", "tensor_tensor", dst, a, b).busy * 0.96

    assert add(tile(128, 129, FP32), a, b) == pytest.approx(2 * 129 + 64)
    psum = bank(128, 129)
    assert add(tile(128, 129, FP32), psum, b) == pytest.approx(129 + 64)
    half = tile(128, 512), tile(128, 512), tile(128, 512)
    assert add(*half) == pytest.approx(512 + 64)
    fused = cost("vector", "scalar_tensor_tensor", tile(128, 129, FP32), psum, b)
    assert fused.busy * 0.96 == pytest.approx(2 * 129 + 64)


def test_reciprocal_costs_eight_cycles_an_element() -> None:
    busy = cost("vector", "reciprocal", tile(128, 16, FP32), tile(128, 16, FP32)).busy
    assert busy * 0.96 == pytest.approx(8 * 16 + 64)


def test_an_isolated_exp_of_128_columns_takes_400_ns() -> None:
    exp = cost("scalar", "activation", tile(128, 128), bank(128, 128), op="exp")
    assert exp.latency == pytest.approx(400, rel=0.05)  # read off the published figure
    assert exp.busy == pytest.approx((128 + 64) / 1.2)
    assert exp.table == "exp"


def test_reading_the_reduction_register_out_adds_64_cycles() -> None:
    stream = Stream()
    sums = tile(128, 1, FP32)
    stream.compute("scalar", "activation", 0, (tile(128, 512), sums), (bank(128, 512),), "exp")
    (record,) = stream.launches[0].records
    assert isinstance(record, Instruction)
    assert occupancy(record, BASE).busy == pytest.approx((512 + 64 + 64) / 1.2)


def test_a_source_stride_above_16_bytes_halves_the_rate() -> None:
    wide = part(tile(128, 9 * 64), slice(0, 9 * 64, 9))  # 18 bytes apart
    near = part(tile(128, 8 * 64), slice(0, 8 * 64, 8))  # 16 bytes apart
    for source, columns in ((wide, 2 * 64), (near, 64)):
        busy = cost("scalar", "activation", tile(128, 64), source, op="exp").busy
        assert busy == pytest.approx((columns + 64) / 1.2)


def test_gpsimd_starts_slowly() -> None:
    busy = cost("gpsimd", "affine_select", tile(128, 128), tile(128, 128)).busy
    assert busy == pytest.approx((150 + 128) / 1.2)
    sort = cost("gpsimd", "topk", tile(16, 8), tile(16, 64))
    assert sort.busy == pytest.approx((4 * 64 + 8 + 150) / 1.2)


def test_an_address_from_a_register_costs_at_least_600_cycles() -> None:
    register = Access(1, "register", "int32", 4, 0, 0, (1,), (4,))
    copy = cost("vector", "tensor_copy", tile(128, 64), tile(128, 64), register)
    assert copy.busy == pytest.approx(600 / 0.96)


def test_a_tensor_reduce_streams_its_input_and_is_faster_on_16_bit_sums() -> None:
    busy = cost("vector", "tensor_reduce", tile(128, 1, FP32), tile(128, 512, FP32), op="add").busy
    assert busy * 0.96 == pytest.approx(512 + 64)
    half = cost("vector", "tensor_reduce", tile(128, 1), tile(128, 512), op="maximum").busy
    assert half * 0.96 == pytest.approx(256 + 64)
