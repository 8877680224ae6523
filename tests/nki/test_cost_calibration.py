"""The cost model against published measurements, and what its own extrapolations are worth."""

import pytest

from segattn.reference.nki.cost.constants import BASE
from segattn.tests.checks.calibration import published_streams as streams
from segattn.tests.checks.calibration.attention import _dense, dense_ns
from segattn.tests.checks.calibration.command import ROWS, Row


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_the_model_is_within_the_tolerance_of_a_published_number(row: Row) -> None:
    assert row.holds, f"{row.what}: published {row.published} {row.unit}, {row.error:+.1%}"


def test_every_row_that_no_parameter_was_tuned_on_is_there() -> None:
    checks = {row.name for row in ROWS if row.kind == "check"}
    assert checks == {
        *("M2", "M3", "M4", "M5", "M5pe", "M5hfu", "M5pk", "M5dve", "D1", "D2", "D3"),
        *("C2", "C3", "C4", "C5", "C6", "C1d", "C2d", "C3d", "C4d", "B1"),
        *("C7", "R1", "R2", "R3", "R4", "R5", "R6"),
    }


def test_a_matmul_kernel_is_linear_in_its_outermost_trips() -> None:
    kernel = streams.matmul_blocked
    one, two, three = (kernel(trips).modelled_ns for trips in (1, 2, 3))
    assert three == pytest.approx(2 * two - one, rel=1e-3)


def test_the_extrapolated_attention_time_is_that_of_a_direct_run() -> None:
    # 2 heads on 2 cores: 6 query groups against 6 sections on each.
    direct = _dense(6, 6, BASE)
    assert dense_ns(2, 6 * 128, 6 * 8192) == pytest.approx(direct, rel=0.01)
