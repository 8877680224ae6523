"""tensor_tensor, tensor_scalar, scalar_tensor_tensor, reciprocal, copies and fills."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from segattn.reference import nki
from segattn.reference.nki.errors import NkiValidationError
from segattn.tests.nki.running import floats, run

nl, nisa = nki.language, nki.isa
BF16 = ml_dtypes.bfloat16

ARITHMETIC = {
    nl.add: np.add,
    nl.subtract: np.subtract,
    nl.multiply: np.multiply,
    nl.maximum: np.maximum,
    nl.minimum: np.minimum,
    nl.equal: np.equal,
    nl.not_equal: np.not_equal,
    nl.less: np.less,
    nl.less_equal: np.less_equal,
    nl.greater: np.greater,
    nl.greater_equal: np.greater_equal,
    nl.logical_and: np.logical_and,
    nl.logical_or: np.logical_or,
    nl.logical_xor: np.logical_xor,
}
BITVEC = {
    nl.bitwise_and: np.bitwise_and,
    nl.bitwise_or: np.bitwise_or,
    nl.bitwise_xor: np.bitwise_xor,
}


@pytest.mark.parametrize("op", ARITHMETIC)
def test_each_arithmetic_operator_computes_in_fp32(op: Any) -> None:
    x = np.round(floats(8, 16), 0)
    y, column = np.round(floats(8, 16, seed=1), 0), np.round(floats(8, 1, seed=2), 0)
    expected = ARITHMETIC[op](x, y).astype(np.float32)
    np.testing.assert_array_equal(
        run(lambda dst, a, b: nisa.tensor_tensor(dst, a, b, op), x, y), expected
    )
    np.testing.assert_array_equal(
        run(lambda dst, a, c: nisa.tensor_scalar(dst, a, op, c), x, column),
        ARITHMETIC[op](x, column).astype(np.float32),
    )
    np.testing.assert_array_equal(
        run(lambda dst, a: nisa.tensor_scalar(dst, a, op, 1.0, reverse0=True), x),
        ARITHMETIC[op](np.float32(1), x).astype(np.float32),
    )


def test_bf16_inputs_are_widened_and_the_result_is_rounded_once() -> None:
    x, y = floats(16, 64, dtype=BF16), floats(16, 64, seed=1, dtype=BF16)
    expected = ((x.astype(np.float32) * np.float32(3)) + np.float32(0.1)).astype(BF16)
    got = run(
        lambda dst, a: nisa.tensor_scalar(dst, a, nl.multiply, 3.0, op1=nl.add, operand1=0.1), x
    )
    np.testing.assert_array_equal(got, expected)
    got = run(lambda dst, a, b: nisa.tensor_tensor(dst, a, b, nl.multiply), x, y)
    np.testing.assert_array_equal(got, (x.astype(np.float32) * y.astype(np.float32)).astype(BF16))


@pytest.mark.parametrize(("reverse0", "reverse1"), [(False, False), (True, False), (False, True)])
def test_reversed_operands_swap_sides(reverse0: bool, reverse1: bool) -> None:
    x, y = floats(8, 6), floats(8, 6, seed=1)

    def apply(a: Any, b: Any, reverse: bool) -> Any:
        return b - a if reverse else a - b

    expected = apply(apply(x, np.float32(2), reverse0), y, reverse1)
    got = run(
        lambda dst, a, b: nisa.scalar_tensor_tensor(
            dst, a, nl.subtract, 2.0, nl.subtract, b, reverse0=reverse0, reverse1=reverse1
        ),
        x,
        y,
    )
    np.testing.assert_array_equal(got, expected)
    got = run(
        lambda dst, a: nisa.tensor_scalar(
            dst, a, nl.subtract, 2.0, reverse0, nl.subtract, 0.5, reverse1
        ),
        x,
    )
    np.testing.assert_array_equal(
        got, apply(apply(x, np.float32(2), reverse0), np.float32(0.5), reverse1)
    )


def test_the_destination_may_be_an_operand() -> None:
    x, y = floats(8, 6), floats(8, 6, seed=1)

    def in_place(dst: Any, a: Any, b: Any) -> None:
        nisa.tensor_copy(dst, b)
        nisa.scalar_tensor_tensor(dst, a, nl.multiply, 2.0, nl.add, dst)
        nisa.tensor_scalar(dst, dst, nl.add, dst[:, 0:1], op1=nl.multiply, operand1=dst[:, 1:2])

    t = 2 * x + y
    expected = (t + t[:, 0:1]) * t[:, 1:2]
    np.testing.assert_allclose(run(in_place, x, y), expected, rtol=1e-6)


def test_unary_operators_take_no_operand() -> None:
    x = np.abs(floats(4, 8)) + 1
    got = run(
        lambda dst, a: nisa.tensor_scalar(dst, a, nl.multiply, 2.0, op1=nl.rsqrt, operand1=None), x
    )
    np.testing.assert_allclose(got, 1 / np.sqrt(2 * x), rtol=1e-6)
    with pytest.raises(NkiValidationError, match=r"operand0 is 2\.0; unary nl\.abs takes"):
        run(lambda dst, a: nisa.tensor_scalar(dst, a, nl.abs, 2.0), x)
    with pytest.raises(NkiValidationError, match=r"op0 nl\.square exists on trn3 only"):
        run(lambda dst, a: nisa.tensor_scalar(dst, a, nl.square, None), x)


@pytest.mark.parametrize("dtype", [np.int32, np.uint16, np.int8])
@pytest.mark.parametrize("op", BITVEC)
def test_bit_operators_work_on_integers_without_a_cast(op: Any, dtype: Any) -> None:
    info = np.iinfo(dtype)
    rng = np.random.default_rng(0)
    x, y = (rng.integers(info.min, info.max, (8, 6), dtype, endpoint=True) for _ in range(2))
    np.testing.assert_array_equal(
        run(lambda dst, a, b: nisa.tensor_tensor(dst, a, b, op), x, y), BITVEC[op](x, y)
    )
    np.testing.assert_array_equal(
        run(lambda dst, a: nisa.tensor_scalar(dst, a, op, -4), x),
        BITVEC[op](x, np.array(-4).astype(dtype)),
    )


def test_shifts_are_logical_and_invert_flips_bits() -> None:
    x = np.array([[-8, 7, 2**30]], np.int32)
    got = run(lambda dst, a: nisa.tensor_scalar(dst, a, nl.right_shift, 1), x)
    np.testing.assert_array_equal(got, [[2**31 - 4, 3, 2**29]])
    got = run(lambda dst, a: nisa.tensor_scalar(dst, a, nl.left_shift, 2), x)
    np.testing.assert_array_equal(got, [[-32, 28, 0]])
    got = run(lambda dst, a: nisa.tensor_scalar(dst, a, nl.invert, None), x)
    np.testing.assert_array_equal(got, ~x)


def test_bit_operators_refuse_floats_and_mixed_kinds() -> None:
    with pytest.raises(NkiValidationError, match="dtype float32; bitvec operators take integer"):
        run(lambda dst, a: nisa.tensor_scalar(dst, a, nl.bitwise_and, 3), floats(4, 4))
    with pytest.raises(NkiValidationError, match="both must be of one kind"):
        run(
            lambda dst, a: nisa.tensor_scalar(dst, a, nl.bitwise_and, 3, op1=nl.add, operand1=1.0),
            np.ones((4, 4), np.int32),
        )
    with pytest.raises(NkiValidationError, match="bitvec operators take integers"):
        run(
            lambda dst, a: nisa.tensor_scalar(dst, a, nl.bitwise_and, 3.0),
            np.ones((4, 4), np.int32),
        )


def test_int32_tensor_tensor_is_exact_on_gpsimd_and_lossy_on_the_vector_engine() -> None:
    x = np.array([[2**24 + 1, 123456789]], np.int32)
    y = np.array([[3, 5]], np.int32)
    np.testing.assert_array_equal(
        run(lambda dst, a, b: nisa.tensor_tensor(dst, a, b, nl.add), x, y), x + y
    )

    def on_vector(dst: Any, a: Any, b: Any) -> None:
        nisa.tensor_tensor(dst, a, b, nl.add, engine=nisa.engine.vector)

    with pytest.raises(NkiValidationError, match=r"holds 16777217, which fp32 .* cannot represent"):
        run(on_vector, x, y)
    small = np.array([[2**24, -5]], np.int32)
    np.testing.assert_array_equal(run(on_vector, small, -y), small - y)
    with nki.strict(inexact_integer="off"):
        np.testing.assert_array_equal(run(on_vector, x, y)[0, 0], 2**24 + 4)


def test_an_int32_result_beyond_24_bits_is_lossy_in_tensor_scalar() -> None:
    x = np.array([[2**20 + 1]], np.int32)

    def times(factor: float) -> Any:
        return run(lambda dst, a: nisa.tensor_scalar(dst, a, nl.multiply, factor), x)

    for factor in (15.0, 64.0):
        assert times(factor)[0, 0] == (2**20 + 1) * factor
    with pytest.raises(NkiValidationError, match=r"result is 17825809, beyond the 2\*\*24"):
        times(17.0)


def test_reciprocal_and_copy_change_dtype_through_fp32() -> None:
    x = floats(4, 8)
    got = run(lambda dst, a: nisa.reciprocal(dst, a), x, out=((4, 8), "bfloat16"))
    np.testing.assert_array_equal(got, (np.float32(1) / x).astype(BF16))
    got = run(lambda dst, a: nisa.tensor_copy(dst, a), x, out=((4, 2, 4), "float16"))
    np.testing.assert_array_equal(got, x.astype(np.float16).reshape(4, 2, 4))


def test_memset_checks_the_value_against_the_dtype() -> None:
    def fill(value: Any) -> Any:
        return run(lambda dst: nisa.memset(dst, value), out=((2, 3), "int8"))

    np.testing.assert_array_equal(fill(-128), np.full((2, 3), -128))
    with pytest.raises(NkiValidationError, match=r"value 1\.5 for a tile of dtype int8"):
        fill(1.5)
    with pytest.raises(NkiValidationError, match="value 128 for dtype int8; allowed: "):
        fill(128)


def dst_is_int() -> Any:
    """A destination that is no tensor."""
    return 3


@pytest.mark.parametrize(
    ("instruction", "text"),
    [
        (lambda d, a, b: nisa.tensor_tensor(d, a, b[:, 0:3], nl.add), r"operand data2 .* both num"),
        (lambda d, a, b: nisa.tensor_tensor(d, a, b[0:2], nl.add), "operand data2 .* both num"),
        (lambda d, a, b: nisa.tensor_scalar(d, a, nl.add, b), r"allowed: a scalar or \[4, 1\]"),
        (lambda d, a, b: nisa.tensor_scalar(d, a, nl.add, "x"), "operand0 is 'x'; allowed: a num"),
        (lambda d, a, b: nisa.tensor_scalar(d, a, nl.add, 1.0, operand1=2.0), "without op1"),
        (lambda d, a, b: nisa.tensor_scalar(d, a, nl.exp, 1.0), "op0 is 'exp'; allowed are nl"),
        (lambda d, a, b: nisa.tensor_tensor(d, a, b, nl.abs_max), "abs_max exists on trn3 only"),
        (lambda d, a, b: nisa.tensor_tensor(d, a, b, nl.abs), r"nl\.abs is unary"),
        (
            lambda d, a, b: nisa.tensor_copy(dst_is_int(), a),
            "operand dst is a int; allowed: an NkiTensor",
        ),
        (
            lambda d, a, b: nisa.tensor_scalar(d, a, nl.maximum, 1.0, engine=nisa.engine.scalar),
            "engine engine.scalar; allowed: vector or unknown",
        ),
        (
            lambda d, a, b: nisa.tensor_copy(d.ap([[4, 4], [0, 4]]), a),
            "dst .* has a broadcast dimension",
        ),
    ],
)
def test_operands_that_do_not_fit_are_named(instruction: Any, text: str) -> None:
    with pytest.raises(NkiValidationError, match=text):
        run(instruction, floats(4, 4), floats(4, 4))


def test_the_scalar_engine_takes_multiply_and_add_only() -> None:
    x = floats(4, 4)
    got = run(
        lambda dst, a: nisa.tensor_scalar(
            dst, a, nl.multiply, 2.0, op1=nl.add, operand1=1.0, engine=nisa.engine.scalar
        ),
        x,
    )
    np.testing.assert_array_equal(got, x * 2 + 1)


def test_a_widened_operand_is_read_again_after_a_write_through_another_view() -> None:
    x = floats(4, 8, dtype=BF16)

    def body(dst: Any, a: Any) -> None:
        scratch = nl.ndarray((4, 8), dtype=nl.float32)
        nisa.tensor_scalar(scratch, a, nl.add, 0.0)
        nisa.memset(a[:, 2:4], 5.0)
        nisa.dma_copy(a[:, 6:8], a[:, 0:2])
        nisa.tensor_scalar(dst, a, nl.add, 0.0)

    expected = x.copy()
    expected[:, 2:4], expected[:, 6:8] = 5.0, x[:, 0:2]
    np.testing.assert_array_equal(run(body, x), expected)
