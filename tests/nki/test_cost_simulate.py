"""Timeline rules of the cost model, each against hand arithmetic with the base constants."""

import pytest

from segattn.reference.nki.cost.constants import BASE, variant
from segattn.reference.nki.cost.needs import needs
from segattn.reference.nki.cost.plan import Step
from segattn.reference.nki.cost.simulate import Timing
from segattn.tests.checks.calibration.streams import Stream, bank, hbm, part, tile
from segattn.tests.nki.timelines import ADD_512, FP32, HOP, scale, starts


def test_independent_instructions_follow_at_the_occupancy() -> None:
    stream = Stream()
    for _ in range(3):
        scale(stream, tile(128, 512, FP32), tile(128, 512, FP32))
    assert starts(stream.evaluate()) == pytest.approx([0, ADD_512, 2 * ADD_512])


def test_a_dependent_instruction_of_the_same_engine_waits_for_the_pipe() -> None:
    stream = Stream()
    a, b = tile(128, 512, FP32), tile(128, 512, FP32)
    scale(stream, a, b)
    scale(stream, tile(128, 512, FP32), a)
    assert starts(stream.evaluate())[1] == pytest.approx((512 + 100) / 0.96)


def test_overwriting_on_the_same_engine_waits_for_nothing_more() -> None:
    stream = Stream()
    a, b = tile(128, 512, FP32), tile(128, 512, FP32)
    scale(stream, a, b)
    scale(stream, a, b)  # after its own write
    scale(stream, b, tile(128, 512, FP32))  # after reads of b
    assert starts(stream.evaluate()) == pytest.approx([0, ADD_512, 2 * ADD_512])


def test_another_engine_waits_for_the_result_and_the_semaphore() -> None:
    stream = Stream()
    a = tile(128, 512, FP32)
    scale(stream, a, tile(128, 512, FP32))
    stream.compute("scalar", "activation", 0, (tile(128, 512),), (a,), "copy")
    assert starts(stream.evaluate())[1] == pytest.approx((512 + 100) / 0.96 + HOP / 1.2)


def test_another_engine_that_overwrites_waits_for_the_reading_only() -> None:
    stream = Stream()
    a = tile(128, 512, FP32)
    scale(stream, tile(128, 512, FP32), a)
    stream.compute("scalar", "activation", 0, (a,), (tile(128, 512),), "copy")
    result = stream.evaluate()
    assert starts(result)[1] == pytest.approx(ADD_512 + HOP / 1.2)
    assert result.timings[1].cause == "WAR"


def test_engines_without_a_hazard_run_side_by_side() -> None:
    stream = Stream()
    scale(stream, tile(128, 512, FP32), tile(128, 512, FP32))
    stream.compute("scalar", "activation", 0, (tile(128, 512),), (tile(128, 512),), "copy")
    stream.matmul(0, bank(128, 512), tile(128, 128), tile(128, 512))
    assert starts(stream.evaluate()) == [0, 0, 0]


def test_the_vector_and_scalar_engines_serialise_on_one_psum_bank_only() -> None:
    for distance, start in ((0, ADD_512), (2048, 0.0)):
        stream = Stream()
        both = bank(128, 1024)
        left = part(both, slice(0, 256))
        right = part(both, slice(256, 512))._replace(offset=1024 + distance)
        scale(stream, tile(128, 512, FP32), left._replace(shape=(128, 512), strides=(1, 2)))
        stream.compute("scalar", "activation", 0, (tile(128, 256),), (right,), "copy")
        assert starts(stream.evaluate())[1] == pytest.approx(start)


def test_the_tensor_engine_writes_a_bank_while_another_engine_reads_it() -> None:
    stream = Stream()
    both = bank(128, 512)
    scale(stream, tile(128, 256, FP32), part(both, slice(0, 256)))
    stream.matmul(0, part(both, slice(256, 512)), tile(128, 128), tile(128, 256))
    assert starts(stream.evaluate()) == [0, 0]


def test_fast_vector_modes_and_gpsimd_take_turns_at_their_port() -> None:
    stream = Stream()
    stream.compute("gpsimd", "memset", 0, (tile(128, 128),), ())
    stream.compute("vector", "tensor_copy", 0, (tile(128, 512),), (tile(128, 512),))
    stream.compute("vector", "tensor_copy", 0, (tile(128, 512, FP32),), (tile(128, 512, FP32),))
    pool = (150 + 128) / 1.2
    assert starts(stream.evaluate()) == pytest.approx([0, pool, pool + (512 / 4 + 64) / 0.96])


def test_row_tiles_of_the_pe_array_run_side_by_side() -> None:
    stream = Stream()
    for row in (0, 64, 0):
        stream.matmul(
            0,
            bank(128, 512),
            tile(64, 128, start=row),
            tile(64, 512, start=row),
            tile_position=(row, 0),
            tile_size=(64, 128),
        )
    result = stream.evaluate(BASE.with_measured({"tensor_ramp_ns": 0}))
    assert starts(result) == pytest.approx([0, 0, 512 / 2.4])
    assert result.busy_ns[0, "tensor"] == pytest.approx(3 * 512 / 2.4 / 2)


def test_a_change_of_activation_function_loads_a_table() -> None:
    stream = Stream()
    for op in ("exp", "exp", "copy", "sqrt"):
        stream.compute("scalar", "activation", 0, (tile(128, 56),), (tile(128, 56),), op)
    times = starts(stream.evaluate())
    assert times == pytest.approx([0, 1380, 1480, 1580])
    assert stream.evaluate().modelled_ns == pytest.approx(1580 + 1280 + 56 / 1.2 + 290)


def test_a_load_takes_first_byte_transfer_and_semaphore() -> None:
    stream = Stream()
    x = tile(128, 1024)
    stream.load(x, hbm(128, 1024))
    scale(stream, tile(128, 1024), x)
    # 8 descriptors of 2 KiB on each of the 16 engines.
    landed = 740 + 8 * (9 + 2048 / 24.5)
    assert starts(stream.evaluate())[1] == pytest.approx(landed + 300)


def test_a_wide_load_is_bound_by_hbm() -> None:
    stream = Stream()
    stream.load(tile(128, 16384), hbm(128, 16384))
    assert stream.evaluate().modelled_ns == pytest.approx(740 + 128 * 32768 / 358 + 300)


def test_a_queue_issues_one_instruction_in_600_ns_and_queues_issue_side_by_side() -> None:
    stream = Stream()
    for trigger in ("sync", "sync", "scalar", "sync"):
        stream.load(tile(16, 64), hbm(16, 64), trigger)
    assert starts(stream.evaluate()) == pytest.approx([0, 600, 0, 1200])


def test_the_scalar_engine_triggers_in_its_own_order_and_goes_on() -> None:
    stream = Stream()
    stream.compute("scalar", "activation", 0, (tile(128, 512),), (tile(128, 512),), "copy")
    stream.load(tile(16, 64), hbm(16, 64), "scalar")
    stream.compute("scalar", "activation", 0, (tile(128, 512),), (tile(128, 512),), "copy")
    busy = (512 + 64) / 1.2
    assert starts(stream.evaluate()) == pytest.approx([0, busy, busy + 64 / 1.2])


def test_two_queues_share_the_engines_in_turn() -> None:
    stream = Stream()
    for trigger in ("sync", "scalar"):
        stream.load(tile(128, 8192), hbm(128, 8192), trigger)
    first, second = (t.done for t in stream.evaluate().timings)
    one = 128 * 16384 / 358
    assert second == pytest.approx(740 + 2 * one + 300)
    # In turn, the first ends one slice (about 0.5 us) before the second, not half-way.
    assert second - 700 < first < second


def test_an_indirect_load_is_prepared_by_gpsimd() -> None:
    stream = Stream()
    rows = hbm(4096, 128)._replace(indirect=True, shape=(128, 128))
    stream.load(tile(128, 128), rows)
    stream.compute("gpsimd", "memset", 0, (tile(128, 8),), ())
    result = stream.evaluate()
    prepared = (150 + 6 * 128) / 1.2
    assert starts(result) == pytest.approx([0, prepared])
    transfer = 8 * (9 + 256 / 24.5)
    assert result.timings[0].done == pytest.approx(prepared + 740 + transfer + 300)


def test_a_copy_of_the_software_dge_takes_gpsimd_a_cycle_for_each_descriptor() -> None:
    stream = Stream()
    stream.load(tile(96, 64), hbm(96, 64), "gpsimd")
    stream.compute("gpsimd", "memset", 0, (tile(128, 8),), ())
    assert starts(stream.evaluate()) == pytest.approx([0, (150 + 96) / 1.2])


def test_the_tensor_engine_runs_at_half_speed_for_3_us_after_it_was_idle() -> None:
    stream = Stream()
    x = tile(128, 512)
    for i in range(20):
        if i == 18:
            stream.load(x, hbm(128, 512))
        stream.matmul(0, bank(128, 512), tile(128, 128), x if i == 18 else tile(128, 512))
    timings = [t for s, t in zip(*plan_and_times(stream), strict=True) if s.stream[1] == "tensor"]
    full = 512 / 2.4
    # 3000 / (2 x 213.3) = 7.03: the eighth begins just before the ramp ends.
    assert [t.free - t.start for t in timings[:9]] == pytest.approx(8 * [2 * full] + [full])
    assert timings[18].start - timings[17].free < 1500  # too short an idle time to slow down
    stream.compute("vector", "memset", 0, (x,), ())
    scale(stream, x, tile(128, 4096, FP32))
    stream.matmul(0, bank(128, 512), tile(128, 128), x)
    last = stream.evaluate().timings[-1]
    assert last.free - last.start == pytest.approx(2 * full)


def plan_and_times(stream: Stream) -> tuple[list[Step], list[Timing]]:
    result = stream.evaluate()
    return result.plan.steps, result.timings


def test_a_tile_waits_for_room_in_sbuf() -> None:
    stream = Stream()
    big, second, third = (tile(128, n * 512) for n in (100, 80, 60))  # KiB per partition
    for each in (big, second, third):
        stream.load(each, hbm(128, each.shape[1]))
        stream.compute("vector", "tensor_copy", 0, (tile(128, 8),), (part(each, slice(0, 8)),))
    result = stream.evaluate()
    first_read, third_load = result.timings[1], result.timings[4]
    assert third_load.start == pytest.approx(first_read.done + HOP / 1.2)
    assert third_load.cause == "room"
    assert needs(result).sbuf_bytes == pytest.approx(180 * 1024, abs=64)


def test_room_is_what_tiles_with_an_address_leave() -> None:
    def third_load(columns: int) -> str:
        stream = Stream()
        arena = tile(128, columns * 512)._replace(tensor=1 << 40)
        stream.compute("gpsimd", "memset", 0, (arena,), ())
        for n in (50, 40, 30):
            fresh = tile(128, n * 512)
            stream.load(fresh, hbm(128, n * 512))
            stream.compute("vector", "tensor_copy", 0, (tile(128, 8),), (part(fresh, slice(0, 8)),))
        return stream.evaluate().timings[5].cause

    assert (third_load(87), third_load(89)) == ("order", "room")


def test_with_whole_tensors_slices_of_one_tile_order_their_users_and_other_tiles_do_not() -> None:
    def second_write(ring: bool) -> float:
        stream = Stream()
        both = tile(128, 1024, FP32)
        slots = [part(both, slice(i * 512, i * 512 + 512)) for i in range(2)]
        slots = slots if ring else [tile(128, 512, FP32) for _ in range(2)]
        scale(stream, slots[0], tile(128, 512, FP32))
        stream.compute("scalar", "activation", 0, (slots[1],), (tile(128, 512, FP32),), "copy")
        return starts(stream.evaluate(variant("whole tensors")))[1]

    assert second_write(ring=True) == pytest.approx((512 + 100) / 0.96 + HOP / 1.2)
    assert second_write(ring=False) == 0


def test_psum_tiles_of_one_core_are_tensors_of_their_own() -> None:
    stream = Stream()
    psum = bank(128, 1024)
    first, second = (
        part(psum, slice(i * 512, i * 512 + 512))._replace(tensor=i + 7) for i in range(2)
    )
    scale(stream, tile(128, 512, FP32), first)
    stream.compute("scalar", "activation", 0, (second,), (tile(128, 512),), "copy")
    assert starts(stream.evaluate(variant("whole tensors")))[1] == 0
    assert needs(stream.evaluate()).psum_banks == 2
