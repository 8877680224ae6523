"""Modelled times of our kernels against a second evaluator, which shares no code with the model."""

import pytest

from segattn.benchmarks.kernels.modelled import public_functions, record
from segattn.benchmarks.kernels.workloads import CacheWrite, Decode, Prefill, Workload
from segattn.reference.nki.cost.result import evaluate
from segattn.tests.checks.calibration.streams import Stream, bank, hbm, tile
from segattn.tests.checks.second_opinion.evaluator import second_us

ROWS = (Decode(16, 2048), Prefill(512, 8192, q_heads=1), Prefill(2048, 0), CacheWrite(2048))
"""Headline rows of each kernel that take seconds; `python -m segattn.tests.checks.second_opinion`
has all of them."""


@pytest.mark.parametrize("work", ROWS, ids=[work.label for work in ROWS])
def test_both_opinions_agree_on_a_headline_row(work: Workload) -> None:
    launches = record(work, public_functions())
    model = sum(evaluate(launch).modelled_us for launch in launches)
    assert sum(second_us(launch) for launch in launches) == pytest.approx(model, rel=0.06)


def test_both_opinions_agree_on_two_cores() -> None:
    (launch,) = record(Decode(2, 1024, q_heads=8, kv_heads=2), public_functions(), lnc=2)
    assert launch.num_cores == 2
    assert second_us(launch) == pytest.approx(evaluate(launch).modelled_us, rel=0.06)


def test_two_cores_wait_for_each_other_at_a_barrier() -> None:
    stream, shared = Stream(2), hbm(1, 8)
    for core in (0, 1):
        for _ in range(1 + core):
            x = tile(128, 512, "float32")
            stream.compute("vector", "tensor_copy", core, (x,), (tile(128, 512, "float32"),))
        stream.compute("vector", "core_barrier", core, (shared,), (shared,))
        stream.compute("vector", "memset", core, (tile(128, 512),), ())
    copy = (512 + 64) / 0.96
    assert second_us(stream.launches[0]) == pytest.approx(
        (2 * copy + 1000 + (512 + 100) / 0.96) / 1e3
    )


def test_the_second_opinion_is_one_by_hand() -> None:
    stream = Stream()
    x, scores = tile(128, 512), bank(128, 512)
    stream.load(x, hbm(128, 512))
    stream.matmul(0, scores, tile(128, 128), x)
    stream.compute("scalar", "activation", 0, (tile(128, 512),), (scores,), "exp")
    landed = 740 + 8 * (9 + 1024 / 24.5) + 300
    scored = landed + (2 * 512 + 64) / 2.4
    expected = scored + 60 / 1.2 + 1280 + 512 / 1.2 + 290
    assert second_us(stream.launches[0]) == pytest.approx(expected / 1e3)
