"""tensor_reduce, tensor_scalar_reduce and the Vector Engine's accumulator registers."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from segattn.reference import nki
from segattn.reference.nki.errors import NkiValidationError
from segattn.tests.nki.running import floats, run

nl, nisa = nki.language, nki.isa
command = nisa.reduce_cmd
REDUCES: dict[Any, Any] = {
    nl.add: np.add.reduce,
    nl.multiply: np.multiply.reduce,
    nl.maximum: np.maximum.reduce,
    nl.minimum: np.minimum.reduce,
    nl.max: np.maximum.reduce,
    nl.min: np.minimum.reduce,
}


@pytest.mark.parametrize("op", REDUCES)
@pytest.mark.parametrize("axes", [(3,), (2, 3), (1, 2, 3), (-1,)])
def test_trailing_free_axes_are_reduced(op: Any, axes: tuple[int, ...]) -> None:
    x = floats(8, 2, 3, 4)
    expected = REDUCES[op](x, axis=axes).reshape(8, -1)
    got = run(
        lambda dst, a: nisa.tensor_reduce(dst, op, a, axes), x, out=(expected.shape, "float32")
    )
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_negate_multiplies_the_result_by_minus_one() -> None:
    x = floats(8, 16, dtype=ml_dtypes.bfloat16)
    got = run(
        lambda dst, a: nisa.tensor_reduce(dst, nl.maximum, a, 1, negate=True),
        x,
        out=((8, 1), "float32"),
    )
    np.testing.assert_array_equal(got[:, 0], -x.astype(np.float32).max(axis=1))


def test_bit_reductions_take_integers() -> None:
    x = np.random.default_rng(0).integers(0, 2**16, (4, 6)).astype(np.uint16)
    got = run(
        lambda dst, a: nisa.tensor_reduce(dst, nl.bitwise_xor, a, 1), x, out=((4, 1), "uint16")
    )
    np.testing.assert_array_equal(got[:, 0], np.bitwise_xor.reduce(x, axis=1))
    with pytest.raises(NkiValidationError, match="dtype float32; bitvec operators take integer"):
        run(
            lambda dst, a: nisa.tensor_reduce(dst, nl.bitwise_xor, a, 1),
            floats(4, 6),
            out=((4, 1), "float32"),
        )


@pytest.mark.parametrize(
    ("op", "axes", "shape", "text"),
    [
        (nl.add, (1,), (4, 3), "allowed: the last free dimensions"),
        (nl.add, (0, 1, 2), (1, 1), "without the partition dimension 0"),
        (nl.add, (2,), (4, 3), r"dst has shape \(4, 3\); needed 4 partitions and 2 elements"),
        (nl.power, (2,), (4, 2), r"nl\.power may not reduce"),
        (nl.subtract, (), (4, 2), "allowed: the last free dimensions"),
    ],
)
def test_a_reduction_over_other_axes_is_refused(op: Any, axes: Any, shape: Any, text: str) -> None:
    with pytest.raises(NkiValidationError, match=text):
        run(
            lambda dst, a: nisa.tensor_reduce(dst, op, a, axes),
            floats(4, 2, 3),
            out=(shape, "float32"),
        )


def test_tensor_scalar_reduce_gives_the_elements_and_their_reduction() -> None:
    x, column = floats(6, 10), floats(6, 1, seed=1)
    sums: list[Any] = []

    def body(dst: Any, a: Any, c: Any) -> None:
        total = nl.ndarray((6, 1), dtype=nl.float32)
        nisa.tensor_scalar_reduce(dst, a, nl.multiply, c, nl.add, total, reduce_res_negate=True)
        sums.append(total.numpy())

    np.testing.assert_array_equal(run(body, x, column), x * column)
    np.testing.assert_allclose(sums[0][:, 0], -(x * column).sum(axis=1), rtol=1e-5)


def test_a_chain_of_reductions_keeps_the_running_value_in_the_engine() -> None:
    x, y = floats(4, 8), floats(4, 8, seed=1)

    def body(dst: Any, a: Any, b: Any) -> None:
        scratch = nl.ndarray((4, 8), dtype=nl.float32)
        nisa.tensor_scalar_reduce(scratch, a, nl.add, 0.0, nl.maximum)
        nisa.tensor_scalar_reduce(
            scratch, b, nl.add, 0.0, nl.maximum, dst, reduce_cmd=command.reduce
        )

    got = run(body, x, y, out=((4, 1), "float32"))
    np.testing.assert_array_equal(got[:, 0], np.maximum(x, y).max(axis=1))


def test_load_reduce_starts_from_a_given_value() -> None:
    x, start = floats(4, 8), np.full((4, 1), 10, np.float32)

    def body(dst: Any, a: Any, s: Any) -> None:
        scratch = nl.ndarray((4, 8), dtype=nl.float32)
        nisa.tensor_scalar_reduce(
            scratch, a, nl.add, 0.0, nl.add, dst, reduce_cmd=command.load_reduce, reduce_init=s
        )

    got = run(body, x, start, out=((4, 1), "float32"))
    np.testing.assert_allclose(got[:, 0], 10 + x.sum(axis=1), rtol=1e-5)


def test_an_idle_select_reduce_makes_the_registers_stale() -> None:
    def body(dst: Any, a: Any, idle: Any) -> None:
        scratch = nl.ndarray((4, 8), dtype=nl.float32)
        ones = nl.ones((4, 8), dtype=nl.uint8)
        nisa.tensor_scalar_reduce(scratch, a, nl.add, 0.0, nl.maximum)
        if idle:
            nisa.select_reduce(scratch, ones, a, 0.0)
        nisa.tensor_scalar_reduce(
            scratch, a, nl.add, 0.0, nl.maximum, dst, reduce_cmd=command.reduce
        )

    x = floats(4, 8)
    run(lambda dst, a: body(dst, a, False), x, out=((4, 1), "float32"))
    with pytest.raises(NkiValidationError, match="no earlier instruction of this engine set"):
        run(lambda dst, a: body(dst, a, True), x, out=((4, 1), "float32"))
    with nki.strict(stale_accumulator="off"):
        got = run(lambda dst, a: body(dst, a, True), x, out=((4, 1), "float32"))
        assert np.isnan(got).all()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"reduce_op": nl.subtract}, r"reduce_op nl\.subtract; allowed: add, multiply, maximum"),
        ({"op0": nl.bitwise_and, "operand0": 1}, "arithmetic operators only"),
        ({"reverse0": True}, "reverse0=True is not supported"),
        ({"reduce_cmd": command.load_reduce}, "needs an initial value"),
        ({"reduce_cmd": "reduce"}, r"allowed: members of nisa\.reduce_cmd"),
    ],
)
def test_arguments_that_tensor_scalar_reduce_lacks_are_named(options: Any, text: str) -> None:
    given = {"op0": nl.add, "operand0": 0.0, "reduce_op": nl.add, **options}
    with pytest.raises(NkiValidationError, match=text):
        run(lambda dst, a: nisa.tensor_scalar_reduce(dst, a, **given), floats(4, 4))


def _vector_chain(first: slice, second: slice) -> Any:
    def body(dst: Any, a: Any) -> None:
        nisa.tensor_copy(dst, a)
        nisa.tensor_scalar_reduce(dst[first], a[first], nl.add, 0.0, nl.add)
        sums = nl.ndarray((second.stop - second.start, 1), dtype=nl.float32)
        nisa.tensor_scalar_reduce(
            dst[second], a[second], nl.add, 0.0, nl.add, sums, reduce_cmd=command.reduce
        )

    return body


def _scalar_chain(first: slice, second: slice) -> Any:
    def body(dst: Any, a: Any) -> None:
        nisa.tensor_copy(dst, a)
        nisa.activation(
            dst[first], nl.copy, a[first], reduce_op=nl.add, reduce_cmd=command.reset_reduce
        )
        sums = nl.ndarray((second.stop - second.start, 1), dtype=nl.float32)
        nisa.activation(
            dst[second], nl.copy, a[second], reduce_op=nl.add, reduce_res=sums,
            reduce_cmd=command.reduce,
        )  # fmt: skip

    return body


@pytest.mark.parametrize("chain", [_vector_chain, _scalar_chain])
def test_a_chain_goes_on_in_the_partitions_that_began_it(chain: Any) -> None:
    x = floats(128, 8)
    whole, low, high = slice(0, 128), slice(0, 64), slice(64, 128)
    for first, second in ((whole, whole), (whole, high), (high, high)):
        np.testing.assert_array_equal(run(chain(first, second), x), x)
    for first, second, partition in ((low, whole, 64), (high, low, 0), (slice(0, 32), low, 32)):
        text = rf"register of partition {partition} .*same partitions.*stale_accumulator"
        with pytest.raises(NkiValidationError, match=text):
            run(chain(first, second), x)
