"""Where engines or cores meet: the edges of device loops, barriers, sendrecvs."""

import pytest

from segattn.reference.nki.cost.constants import BASE
from segattn.reference.nki.records import Access
from segattn.tests.checks.calibration.streams import Stream, hbm, tile
from segattn.tests.nki.timelines import ADD_512, FP32, HOP, scale, starts


def loop(stream: Stream, trips: int) -> None:
    stream.loop("begin", 0)
    for _ in range(trips):
        stream.loop("iteration", 0)
        scale(stream, tile(128, 512, FP32), tile(128, 512, FP32))
        stream.compute("scalar", "activation", 0, (tile(128, 8),), (tile(128, 8),), "copy")
    stream.loop("end", 0)


TRIP = 9000


def test_each_trip_of_a_dynamic_loop_costs_9_us_after_all_engines_of_the_core_met() -> None:
    stream = Stream()
    loop(stream, 2)
    stream.compute("gpsimd", "memset", 0, (tile(128, 8),), ())
    times = starts(stream.evaluate())
    body = (512 + 100) / 0.96
    assert times[0] == times[1] == pytest.approx(TRIP)
    assert times[2] == times[3] == pytest.approx(2 * TRIP + body)
    # GpSimd has no work in the loop, but meets the others at its edges.
    assert times[4] == pytest.approx(2 * TRIP + 2 * body)


def test_a_loop_without_a_trip_is_a_barrier_that_costs_one() -> None:
    stream = Stream()
    scale(stream, tile(128, 512, FP32), tile(128, 512, FP32))
    stream.loop("begin", 0)
    stream.loop("end", 0)
    stream.compute("gpsimd", "memset", 0, (tile(128, 8),), ())
    assert starts(stream.evaluate())[1] == pytest.approx((512 + 100) / 0.96 + TRIP)


def test_dma_in_flight_goes_on_over_the_edge_of_a_loop_unless_the_field_says_it_does_not() -> None:
    stream = Stream()
    x = tile(128, 16384)
    stream.load(x, hbm(128, 16384))
    loop(stream, 1)
    landed = 740 + 128 * 32768 / 358 + 300
    assert landed > TRIP
    assert starts(stream.evaluate())[1] == pytest.approx(600 + TRIP)
    waits = BASE.with_measured({"dma_crosses_loops": False})
    assert starts(stream.evaluate(waits))[1] == pytest.approx(landed + TRIP)


def test_a_loop_waits_for_its_trip_count() -> None:
    stream = Stream()
    register = Access(99, "register", "int32", 4, 0, 0, (1,), (4,))
    x = tile(1, 1, "int32")
    stream.load(x, hbm(1, 1, "int32"), "sync")
    stream.compute("sync", "register_load", 0, (register,), (x,))
    stream.loop("begin", 0, (register,))
    stream.loop("iteration", 0)
    scale(stream, tile(128, 512, FP32), tile(128, 512, FP32))
    stream.loop("end", 0)
    landed = 740 + 9 + 4 / 24.5 + 300
    assert starts(stream.evaluate())[2] == pytest.approx(landed + 100 + HOP / 0.96 + TRIP)


def test_cores_meet_at_a_barrier_and_have_engines_of_their_own() -> None:
    stream = Stream(2)
    shared = hbm(1, 8)
    for core in (0, 1):
        for _ in range(1 + core):
            x = tile(128, 512, FP32)
            stream.compute("vector", "tensor_copy", core, (x,), (tile(128, 512, FP32),))
        stream.compute("vector", "core_barrier", core, (shared,), (shared,))
        stream.compute("vector", "memset", core, (tile(128, 8),), ())
    times = starts(stream.evaluate())
    assert times[0] == times[3] == 0
    assert times[2] == times[6] == pytest.approx(2 * ADD_512 + 1000)


def test_a_barrier_that_one_core_never_reaches_is_an_error() -> None:
    stream = Stream(2)
    shared = hbm(1, 8)
    for core in (0, 1, 1):
        stream.compute("gpsimd", "core_barrier", core, (shared,), (shared,))
    with pytest.raises(ValueError, match="core_barrier number 1 is reached by core 1 only"):
        stream.evaluate()


def test_a_sendrecv_starts_on_both_cores_at_once() -> None:
    stream = Stream(2)
    x = tile(128, 512, FP32)
    stream.compute("vector", "memset", 1, (x,), ())
    for core, src in ((0, tile(128, 512, FP32)), (1, x)):
        stream.dma("sendrecv", core, (tile(128, 512, FP32),), (src,))
    times = starts(stream.evaluate())
    assert times[1] == times[2] > 0
