"""The wrappers of nki.language against NumPy."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from segattn.reference import nki
from segattn.reference.nki.errors import NkiValidationError
from segattn.tests.nki.running import floats, nisa, nl, run

Array = Any
COLUMNS = np.linspace(-1.25, 1.5, 24, dtype=np.float32).reshape(2, 12)


def evaluate(function: Callable[..., Any], *inputs: Array, shape: Any = None) -> Array:
    """Run `function(*tiles)` in a kernel and return the tile it makes as an array."""

    def body(dst: Any, *tiles: Any) -> None:
        nisa.tensor_copy(dst, function(*tiles))

    return run(body, *inputs, out=(shape or inputs[0].shape, "float32"))


def _softplus(x: Array) -> Array:
    return np.log1p(np.exp(x))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (nl.tanh, np.tanh),
        (nl.relu, lambda x: np.maximum(x, 0)),
        (nl.softplus, _softplus),
        (nl.mish, lambda x: x * np.tanh(_softplus(x))),
        (nl.sin, np.sin),
        (nl.cos, np.cos),
        (nl.tan, np.tan),
        (nl.ceil, np.ceil),
        (nl.floor, np.floor),
        (nl.trunc, np.trunc),
        (nl.negative, np.negative),
        (nl.sign, np.sign),
    ],
)
def test_functions_of_one_tile_are_those_of_their_names(function: Any, expected: Any) -> None:
    found = evaluate(function, COLUMNS)
    np.testing.assert_allclose(found, expected(COLUMNS.astype(np.float64)), rtol=2e-6, atol=2e-7)


def test_logical_not_turns_0_and_1_round() -> None:
    bits = np.array([[0, 1, 1, 0]], np.float32)
    assert evaluate(nl.logical_not, bits).tolist() == [[1, 0, 0, 1]]


@pytest.mark.parametrize(
    ("function", "reference"),
    [
        (nl.sum, np.sum),
        (nl.max, np.max),
        (nl.min, np.min),
        (nl.mean, np.mean),
        (nl.prod, np.prod),
        (nl.var, np.var),
    ],
)
def test_reductions_fold_the_last_free_axes(function: Any, reference: Any) -> None:
    data = floats(4, 3, 5)
    wide = data.astype(np.float64)
    for axis, shape in (([2], (4, 3, 1)), ([1, 2], (4, 1, 1))):
        found = evaluate(lambda x, a=axis: function(x, a, keepdims=True), data, shape=shape)
        expected = reference(wide, axis=tuple(axis), keepdims=True)
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-6)


def test_all_is_the_logical_and_along_the_axis() -> None:
    data = np.array([[1, 2, 3], [1, 0, 3]], np.float32)
    assert evaluate(lambda x: nl.all(x, [1]), data, shape=(2, 1)).tolist() == [[1], [0]]


def test_reductions_refuse_the_partition_axis() -> None:
    with pytest.raises(NkiValidationError, match="axis"):
        evaluate(lambda x: nl.sum(x, [0]), floats(4, 4))


def test_softmax_and_rms_norm() -> None:
    data = floats(4, 8)
    wide = data.astype(np.float64)
    weights = np.exp(wide - wide.max(axis=1, keepdims=True))
    found = evaluate(lambda x: nl.softmax(x, axis=1), data)
    np.testing.assert_allclose(found, weights / weights.sum(axis=1, keepdims=True), rtol=1e-6)
    weight = floats(4, 8, seed=1)
    found = evaluate(lambda x, w: nl.rms_norm(x, w, axis=1, n=8), data, weight)
    rms = np.sqrt((wide**2).sum(axis=1, keepdims=True) / 8 + 1e-6)
    np.testing.assert_allclose(found, wide / rms * weight, rtol=2e-6)


def test_where_chooses_by_a_tile_of_ones_and_zeros() -> None:
    condition = np.array([[1, 0, 1]], np.float32)
    x, y = np.array([[1, 2, 3]], np.float32), np.array([[4, 5, 6]], np.float32)
    assert evaluate(nl.where, condition, x, y).tolist() == [[1, 5, 3]]


def test_dropout_of_rate_1_is_zero_and_of_rate_0_nothing() -> None:
    data = floats(4, 8)
    np.testing.assert_array_equal(evaluate(lambda x: nl.dropout(x, 0.0), data), data)
    assert not evaluate(lambda x: nl.dropout(x, 1.0), data).any()


def test_rand_is_uniform_and_repeats_with_random_seed() -> None:
    def twice(dst: Any, seed: Any) -> None:
        for half in range(2):
            nl.random_seed(seed)
            nisa.tensor_copy(dst[:, half], nl.rand((64, 1, 512), dtype=nl.float32))

    seed = np.array([[42]], np.int32)
    found = run(twice, seed, out=((64, 2, 512), "float32"))
    np.testing.assert_array_equal(found[:, 0], found[:, 1])
    assert 0 <= found.min() < 0.01 < 0.99 < found.max() < 1
    # The mean of 32768 uniform values has a standard deviation of 0.0016.
    assert abs(found[:, 0].mean() - 0.5) < 0.01


def test_transposes_swap_partitions_and_columns() -> None:
    data = floats(8, 16)
    found = evaluate(nl.transpose, data, shape=(16, 8))
    np.testing.assert_array_equal(found, data.T)

    @nki.jit
    def kernel(x: Any) -> Any:
        out = nl.ndarray((16, 8), dtype=x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.load_transpose2d(x))
        return out

    np.testing.assert_array_equal(kernel(data), data.T)


def test_matmul_contracts_the_partitions_of_a_transposed_left_operand() -> None:
    x, y = floats(16, 8), floats(16, 12, seed=1)
    found = evaluate(lambda a, b: nl.matmul(a, b, transpose_x=True), x, y, shape=(8, 12))
    np.testing.assert_allclose(found, x.T @ y, rtol=1e-5, atol=1e-5)


def test_views_of_a_tile_in_functional_form() -> None:
    data = floats(4, 1, 6)
    found = evaluate(lambda x: nl.broadcast_to(x, (4, 3, 6)), data, shape=(4, 3, 6))
    np.testing.assert_array_equal(found, np.broadcast_to(data, (4, 3, 6)))
    found = evaluate(lambda x: nl.expand_dims(x, 1), data[:, 0], shape=(4, 1, 6))
    np.testing.assert_array_equal(found, data)


def test_gather_flattened_indexes_each_partition() -> None:
    data, index = floats(2, 6), np.array([[5, 0], [2, 2]], np.uint32)
    found = evaluate(nl.gather_flattened, data, index, shape=(2, 2))
    np.testing.assert_array_equal(found, [data[p, index[p]] for p in range(2)])


@pytest.mark.parametrize("function", [nl.divide, nl.mod, nl.fmod])
def test_what_the_hardware_does_not_have_is_refused_with_a_replacement(function: Any) -> None:
    with pytest.raises(NkiValidationError, match="does not exist on the device"):
        evaluate(lambda x: function(x, x), floats(2, 4))
