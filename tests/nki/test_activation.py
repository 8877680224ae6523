"""activation and activation_reduce: functions, scale and bias, running sums, valid ranges."""

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from segattn.reference import nki
from segattn.reference.nki.errors import NkiValidationError, NkiWarning
from segattn.tests.nki.running import floats, run

nl, nisa = nki.language, nki.isa


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def _erf_gelu(x: float) -> float:
    return x * 0.5 * (1 + math.erf(x / math.sqrt(2)))


FUNCTIONS: dict[Any, Any] = {
    nl.copy: lambda x: x,
    nl.square: lambda x: x * x,
    nl.sigmoid: _sigmoid,
    nl.relu: lambda x: max(x, 0.0),
    nl.gelu: _erf_gelu,
    nl.gelu_apprx_sigmoid: lambda x: x * _sigmoid(1.702 * x),
    nl.gelu_apprx_tanh: lambda x: (
        0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    ),
    nl.silu: lambda x: x * _sigmoid(x),
    nl.tanh: math.tanh,
    nl.softplus: lambda x: math.log1p(math.exp(x)),
    nl.mish: lambda x: x * math.tanh(math.log1p(math.exp(x))),
    nl.erf: math.erf,
    nl.exp: math.exp,
    nl.sin: math.sin,
    nl.arctan: math.atan,
    nl.sign: lambda x: math.copysign(1.0, x),
    nl.abs: abs,
}
POSITIVE: dict[Any, Any] = {
    nl.log: math.log,
    nl.sqrt: math.sqrt,
    nl.rsqrt: lambda x: 1 / math.sqrt(x),
    nl.reciprocal: lambda x: 1 / x,
}


@pytest.mark.parametrize("op", [*FUNCTIONS, *POSITIVE])
def test_functions_are_the_mathematical_ones_in_fp32(op: Any) -> None:
    x = np.linspace(-1.5, 1.5, 32, dtype=np.float32).reshape(4, 8)
    if op in POSITIVE:
        x = np.abs(x) + np.float32(0.1)
    function = FUNCTIONS.get(op) or POSITIVE[op]
    expected = np.vectorize(lambda v: function(float(v)))(x)
    got = run(lambda dst, a: nisa.activation(dst, op, a), x)
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("derivative", "function"),
    [
        (nl.gelu_dx, nl.gelu),
        (nl.gelu_apprx_sigmoid_dx, nl.gelu_apprx_sigmoid),
        (nl.silu_dx, nl.silu),
        (nl.erf_dx, nl.erf),
    ],
)
def test_derivatives_agree_with_central_differences(derivative: Any, function: Any) -> None:
    x = np.linspace(-3, 3, 16, dtype=np.float32).reshape(2, 8)
    h = 1e-4
    expected = np.vectorize(
        lambda v: (FUNCTIONS[function](v + h) - FUNCTIONS[function](v - h)) / (2 * h)
    )(x.astype(np.float64))
    got = run(lambda dst, a: nisa.activation(dst, derivative, a), x)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op", [nl.gelu, nl.silu, nl.gelu_apprx_tanh, nl.sigmoid, nl.exp, nl.erf])
def test_infinities_give_limits_and_no_nan(op: Any) -> None:
    got = run(lambda dst, a: nisa.activation(dst, op, a), np.array([[-np.inf, np.inf]], np.float32))
    limits = {"sigmoid": (0, 1), "exp": (0, np.inf), "erf": (-1, 1)}
    np.testing.assert_array_equal(got[0], limits.get(op.__name__, (0, np.inf)))


def test_scale_and_bias_are_applied_before_the_function() -> None:
    x, scale, bias = floats(4, 6), floats(4, 1, seed=1), floats(4, 1, seed=2)
    got = run(
        lambda dst, a, s, b: nisa.activation(dst, nl.square, a, bias=b, scale=s), x, scale, bias
    )
    np.testing.assert_allclose(got, (x * scale + bias) ** 2, rtol=1e-5)
    got = run(lambda dst, a: nisa.activation(dst, nl.square, a, bias=0.5, scale=-2.0), x)
    np.testing.assert_allclose(got, (x * -2 + 0.5) ** 2, rtol=1e-6)


def test_the_sum_is_taken_before_the_cast_to_dst() -> None:
    x = floats(8, 64)
    sums: list[Any] = []

    def body(dst: Any, a: Any) -> None:
        total = nl.ndarray((8, 1), dtype=nl.float32)
        nisa.activation_reduce(dst, nl.exp, a, nl.add, total)
        sums.append(total.numpy())

    got = run(body, x, out=((8, 64), "bfloat16"))
    np.testing.assert_allclose(sums[0][:, 0], np.exp(x).sum(axis=1), rtol=1e-6)
    np.testing.assert_array_equal(got, np.exp(x).astype(ml_dtypes.bfloat16))


def test_the_accumulator_runs_over_several_instructions() -> None:
    x = floats(8, 12)
    command = nisa.reduce_cmd

    def body(dst: Any, a: Any) -> None:
        scratch = nl.ndarray((8, 12), dtype=nl.float32)
        nisa.activation(scratch, nl.copy, a, reduce_op=nl.add, reduce_cmd=command.reset_reduce)
        nisa.activation(scratch, nl.copy, a, scale=5.0)  # idle: not added
        nisa.activation(
            scratch, nl.relu, a, reduce_op=nl.add, reduce_res=dst, reduce_cmd=command.reduce
        )

    got = run(body, x, out=((8, 1), "float32"))
    np.testing.assert_allclose(got[:, 0], (x + np.maximum(x, 0)).sum(axis=1), rtol=1e-5)


@pytest.mark.parametrize("command", ["reduce", "idle"])
def test_reading_an_accumulator_that_nothing_set_is_an_error(command: str) -> None:
    def body(dst: Any, a: Any) -> None:
        scratch = nl.ndarray(a.shape, dtype=nl.float32)
        nisa.activation(
            scratch,
            nl.copy,
            a,
            reduce_op=nl.add,
            reduce_res=dst,
            reduce_cmd=nisa.reduce_cmd[command],
        )

    with pytest.raises(NkiValidationError, match=r"start the chain with reduce_cmd\.reset_reduce"):
        run(body, floats(4, 4), out=((4, 1), "float32"))


@pytest.mark.parametrize(
    ("op", "inside", "outside"),
    [
        (nl.log, 2.0**-64, 0.0),
        (nl.sqrt, 2.0**118, -1.0),
        (nl.sqrt, 2.0**-116, 2.0**-117),
        (nl.rsqrt, 2.0**97, 2.0**98),
        (nl.reciprocal, -(2.0**-42), 2.0**-43),
        (nl.sin, math.pi * 0.999, 4.0),
        (nl.arctan, 1.5, -1.6),
    ],
)
def test_inputs_outside_the_valid_range_are_an_error(
    op: Any, inside: float, outside: float
) -> None:
    def body(dst: Any, a: Any) -> None:
        nisa.activation(dst, op, a)

    run(body, np.full((2, 2), inside, np.float32))
    bad = np.array([[inside, outside]], np.float32)
    with pytest.raises(NkiValidationError, match=rf"op nl\.{op.__name__} gets .* valid inputs are"):
        run(body, bad)
    with nki.strict(activation_range="warn"), pytest.warns(NkiWarning, match="valid inputs are"):
        run(body, bad)


def test_sin_outside_its_range_extrapolates_a_cubic() -> None:
    with nki.strict(activation_range="off"):
        got = run(lambda dst, a: nisa.activation(dst, nl.sin, a), np.array([[9.0]], np.float32))
    assert got[0, 0] == pytest.approx(27.65, abs=0.01)  # the documented value


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"op": nl.add}, "op is 'add'; allowed are nl"),
        ({"scale": "wide"}, r"operand scale .* allowed: a scalar or \[4, 1\]"),
        ({"scale": "half"}, "operand scale .* dtype bfloat16; allowed: float32"),
        ({"bias": "wide"}, r"operand bias .* allowed: a scalar or \[4, 1\]"),
        (
            {"reduce_op": nl.maximum, "reduce_cmd": nisa.reduce_cmd.reset_reduce},
            r"reduce_op is 'maximum'; allowed: nl\.add",
        ),
    ],
)
def test_arguments_the_engine_lacks_are_named(options: dict[str, Any], text: str) -> None:
    def body(dst: Any, a: Any) -> None:
        half = nl.zeros((4, 1), dtype=nl.bfloat16)
        tiles = {"wide": a, "half": half}
        given = {k: tiles[v] if isinstance(v, str) else v for k, v in options.items()}
        nisa.activation(dst, given.pop("op", nl.exp), a, **given)

    with pytest.raises(NkiValidationError, match=text):
        run(body, floats(4, 4))


@nki.strict(square_sum="off")
def test_a_reduction_may_discard_its_elements_in_a_tile_of_free_step_0() -> None:
    def body(dst: Any, data: Any) -> None:
        discarded = nl.ndarray((4, 1), dtype=nl.float32)
        nisa.activation_reduce(
            discarded.ap([[1, 4], [0, 8]]), nl.square, data, reduce_op=nl.add, reduce_res=dst
        )

    x = floats(4, 8)
    found = run(body, x, out=((4, 1), "float32"))
    np.testing.assert_allclose(found[:, 0], (x * x).sum(axis=1), rtol=1e-6)


def test_without_a_reduction_a_free_step_of_0_loses_elements_and_is_refused() -> None:
    def body(dst: Any, data: Any) -> None:
        nisa.activation(dst.ap([[1, 4], [0, 8]]), nl.square, data)

    with pytest.raises(NkiValidationError, match="broadcast dimension"):
        run(body, floats(4, 8), out=((4, 1), "float32"))


def test_the_bias_may_be_a_column_of_the_destination() -> None:
    x, start = floats(4, 6), floats(4, 6, seed=1)

    def body(dst: Any, a: Any, s: Any) -> None:
        nisa.tensor_copy(dst, s)
        nisa.activation(dst, nl.copy, a, bias=dst[:, 0:1], scale=2.0)

    np.testing.assert_allclose(run(body, x, start), 2 * x + start[:, 0:1], rtol=1e-6)
