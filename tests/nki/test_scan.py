"""tensor_tensor_scan and tensor_scalar_cumulative, by the recurrences of the documentation."""

from typing import Any

import numpy as np
import pytest

from segattn.reference import nki
from segattn.reference.nki.errors import NkiValidationError
from segattn.tests.nki.running import floats, nisa, nl, run


def test_scan_is_the_documented_recurrence() -> None:
    a = np.array([[2, 3, 4]], np.float32)
    b = np.array([[10, 20, 30]], np.float32)
    found = run(
        lambda dst, x, y: nisa.tensor_tensor_scan(dst, x, y, 1.0, nl.multiply, nl.add), a, b
    )
    # 2*1+10 = 12; 3*12+20 = 56; 4*56+30 = 254
    assert found.tolist() == [[12, 56, 254]]


@pytest.mark.parametrize(
    ("reverse0", "reverse1", "expected"),
    [
        # op0 and op1 subtract, initial 1: ((d0 - s) - d1) with either order turned round.
        (False, False, [[5 - 1 - 2, 7 - 2 - 3]]),
        (True, False, [[1 - 5 - 2, -6 - 7 - 3]]),
        (False, True, [[2 - (5 - 1), 3 - (7 - -2)]]),
        (True, True, [[2 - (1 - 5), 3 - (6 - 7)]]),
    ],
)
def test_scan_reverses_the_operands_of_either_operator(
    reverse0: bool, reverse1: bool, expected: list[list[float]]
) -> None:
    a, b = np.array([[5, 7]], np.float32), np.array([[2, 3]], np.float32)
    found = run(
        lambda dst, x, y: nisa.tensor_tensor_scan(
            dst, x, y, 1.0, nl.subtract, nl.subtract, reverse0, reverse1
        ),
        a,
        b,
    )
    assert found.tolist() == expected


def test_scan_starts_from_a_column_and_keeps_fp32_between_steps() -> None:
    # 1 + 2**-9 is lost in bfloat16 at each step but not in the fp32 state.
    step = np.full((2, 512), 2.0**-9, np.float32)
    ones = np.ones((2, 512), np.float32)
    start = np.array([[1], [3]], np.float32)
    found = run(
        lambda dst, o, s, i: nisa.tensor_tensor_scan(dst, o, s, i, nl.multiply, nl.add),
        ones,
        step,
        start,
        out=((2, 512), "bfloat16"),
    )
    assert found[:, -1].astype(np.float32).tolist() == [2, 4]


def test_scan_refuses_unequal_sizes_two_psum_inputs_and_bit_operators() -> None:
    def in_psum(dst: Any, x: Any) -> None:
        tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.psum)
        nisa.tensor_copy(tile, x)
        nisa.tensor_tensor_scan(dst, tile, tile, 0.0, nl.multiply, nl.add)

    for body, message in (
        (in_psum, "both in PSUM"),
        (lambda d, x: nisa.tensor_tensor_scan(d, x, x[:, 0:2], 0.0, nl.add, nl.add), "data1"),
        (lambda d, x: nisa.tensor_tensor_scan(d, x, x, 0.0, nl.bitwise_or, nl.add), "bitwise_or"),
        (lambda d, x: nisa.tensor_tensor_scan(d, x, x, x, nl.add, nl.add), "initial"),
    ):
        with pytest.raises(NkiValidationError, match=message):
            run(body, floats(2, 4))


@pytest.mark.parametrize(
    ("op1", "expected"),
    [
        (nl.add, [2, 5, 4, 8]),
        (nl.multiply, [2, 6, -6, -24]),
        (nl.maximum, [2, 3, 3, 4]),
        (nl.minimum, [2, 2, -1, -1]),
        # r = x - r from 0
        (nl.subtract, [2, 1, -2, 6]),
    ],
)
def test_cumulative_runs_from_the_identity_of_its_operator(op1: Any, expected: list[float]) -> None:
    data = np.array([[1, 2, -2, 3]], np.float32)
    found = run(
        lambda dst, d: nisa.tensor_scalar_cumulative(dst, d, nl.add, op1, 1.0),
        data,
    )
    assert found.tolist() == [expected]


def test_cumulative_continues_or_loads_its_register() -> None:
    def body(dst: Any, d: Any) -> None:
        cumulative = nisa.tensor_scalar_cumulative
        cumulative(dst[:, 0:2], d[:, 0:2], nl.add, nl.add, 0.0)
        cumulative(dst[:, 2:4], d[:, 2:4], nl.add, nl.add, 0.0, None, nisa.reduce_cmd.reduce)
        load = nisa.reduce_cmd.load_reduce
        cumulative(dst[:, 4:6], d[:, 4:6], nl.add, nl.add, 0.0, 100.0, load)

    data = np.arange(1, 7, dtype=np.float32).reshape(1, 6)
    assert run(body, data).tolist() == [[1, 3, 6, 10, 105, 111]]


def test_cumulative_refuses_what_the_register_does_not_hold() -> None:
    def stale(dst: Any, d: Any) -> None:
        command = nisa.reduce_cmd.reduce
        nisa.tensor_scalar_cumulative(dst, d, nl.add, nl.add, 0.0, None, command)

    with pytest.raises(NkiValidationError, match="stale_accumulator"):
        run(stale, floats(2, 4))
    for body, data, message in (
        (
            lambda d, x: nisa.tensor_scalar_cumulative(d, x, nl.add, nl.power, 0.0),
            floats(2, 4),
            "op1 nl.power",
        ),
        (
            lambda d, x: nisa.tensor_scalar_cumulative(d, x, nl.add, nl.add, 0.0),
            np.ones((2, 4), np.int32),
            "dtype int32",
        ),
    ):
        with pytest.raises(NkiValidationError, match=message):
            run(body, data)


def test_the_accumulator_is_shared_with_tensor_scalar_reduce() -> None:
    def body(dst: Any, d: Any) -> None:
        scratch = nl.ndarray(d.shape, dtype=d.dtype)
        nisa.tensor_scalar_reduce(scratch, d, nl.add, 0.0, nl.add)
        command = nisa.reduce_cmd.reduce
        nisa.tensor_scalar_cumulative(dst, d, nl.add, nl.add, 0.0, None, command)

    data = np.array([[1, 2, 3]], np.float32)
    with nki.strict(stale_accumulator="error"):
        assert run(body, data).tolist() == [[7, 9, 12]]
