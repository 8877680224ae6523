"""NkiScalar: device integers with arithmetic, as loop bounds and addresses; int64."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segattn.reference import nki
from segattn.reference.nki.errors import NkiValidationError, OutOfBoundsError
from segattn.reference.nki.trace import Trace

nl: Any = nki.language  # the tests pass wrong types on purpose
nisa: Any = nki.isa
INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)


def one(value: int, dtype: str = "int32") -> Any:
    return np.array([[value]], dtype)


@nki.jit
def arithmetic(x: Any, y: Any, number: int) -> Any:
    results = nl.ndarray((7, 1), dtype=x.dtype, buffer=nl.shared_hbm)
    a, b = nisa.scalar_load(x), nisa.scalar_load(nl.load(y))
    assert a.dtype == b.dtype == x.dtype
    for i, value in enumerate((a + b, a - b, a * +b, -a, number - a, number * a, number + b)):
        nisa.scalar_store(results[i : i + 1, :], value)
    return results


@given(INT32, INT32, INT32)
def test_int32_wraps_as_the_device_does(a: int, b: int, number: int) -> None:
    exact = [a + b, a - b, a * b, -a, number - a, number * a, number + b]
    expected = [(v + 2**31) % 2**32 - 2**31 for v in exact]
    assert arithmetic(one(a), one(b), number).reshape(-1).tolist() == expected


@given(INT64, INT64, INT64)
def test_int64_keeps_64_bits_and_wraps_there(a: int, b: int, number: int) -> None:
    exact = [a + b, a - b, a * b, -a, number - a, number * a, number + b]
    expected = [(v + 2**63) % 2**64 - 2**63 for v in exact]
    got = arithmetic(one(a, "int64"), one(b, "int64"), number)
    assert got.reshape(-1).tolist() == expected


def test_the_documented_product_wraps() -> None:
    got = arithmetic(one(100000), one(100000), 0)
    assert got[2, 0] == 1410065408


def test_a_loop_counts_to_an_expression_of_scalars_and_addresses_rows() -> None:
    @nki.jit
    def kernel(x: Any, count: Any) -> Any:
        out = nl.zeros((4, 8), dtype=x.dtype, buffer=nl.shared_hbm)
        trips = nisa.scalar_load(count)

        def body(i: Any) -> None:
            assert isinstance(i, nisa.NkiScalar)
            row = 2 * i + 1
            nisa.dma_copy(
                out.ap([[8, 1], [1, 8]], scalar_offset=i, indirect_dim=0),
                x.ap([[8, 1], [1, 8]], scalar_offset=row, indirect_dim=0),
            )

        nl.fori_loop(0, trips - 1, body)
        return out

    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    expected = np.zeros((4, 8), np.float32)
    expected[:3] = x[1:6:2]
    np.testing.assert_array_equal(kernel(x, one(4)), expected)
    with pytest.raises(OutOfBoundsError, match="scalar offset 9 x step 8"):
        kernel(x, one(6))


def test_the_body_gets_a_register_when_a_bound_is_one() -> None:
    kinds = []

    @nki.jit
    def kernel(count: Any) -> None:
        register = nisa.register_alloc(2)
        scalar = nisa.scalar_load(count)
        for lower, upper in ((0, 1), (0, scalar), (0, register), (scalar - 1, register)):
            nl.fori_loop(lower, upper, lambda i: kinds.append(type(i)))

    kernel(one(1))
    scalars = [nisa.NkiScalar, nisa.NkiScalar]
    assert kinds == [*scalars, *[nisa.VirtualRegister] * 4]


@pytest.mark.parametrize(
    "view",
    [
        lambda x, i: x[i],
        lambda x, i: x[nl.ds(i, 1)].reshape((8,)),
        lambda x, i: x.select(0, i),
        lambda x, i: x.ap([[1, 8]], scalar_offset=i, indirect_dim=0),
    ],
)
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_a_scalar_addresses_a_tensor_in_hbm(view: Any, dtype: str) -> None:
    @nki.jit
    def kernel(x: Any, row: Any) -> Any:
        out = nl.ndarray((8,), dtype=x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(out, view(x, nisa.scalar_load(row) + 1))
        return out

    x = np.arange(32, dtype=np.float32).reshape(4, 8)
    np.testing.assert_array_equal(kernel(x, one(1, dtype)), x[2])


def test_affine_select_and_iota_take_a_scalar_as_offset() -> None:
    @nki.jit
    def kernel(start: Any) -> Any:
        out = nl.ndarray((2, 4), dtype=nl.int32, buffer=nl.shared_hbm)
        tile = nl.ndarray((2, 4), dtype=nl.int32)
        nisa.iota(tile, [[1, 4]], offset=nisa.scalar_load(start) * 3, channel_multiplier=10)
        nisa.dma_copy(out, tile)
        return out

    np.testing.assert_array_equal(kernel(one(2)), [[6, 7, 8, 9], [16, 17, 18, 19]])


def test_what_depends_on_a_scalar_waits_for_the_load_in_a_trace() -> None:
    @nki.jit
    def kernel(x: Any) -> None:
        scalar = nisa.scalar_load(x)
        row = scalar * 2 + 1
        nisa.dma_copy(nl.ndarray((1, 4), nl.float32), nl.zeros((4, 4), nl.float32, nl.hbm)[row])

    with Trace() as trace:
        kernel(one(1))
    loaded, doubled, added = (
        item
        for item in trace.launches[0].records
        if getattr(item, "opcode", "").startswith("scalar_")
    )
    assert [item.opcode for item in (loaded, doubled, added)] == [
        "scalar_load",
        "scalar_multiply",
        "scalar_add",
    ]
    assert doubled.reads == loaded.writes
    assert added.reads == doubled.writes


@pytest.mark.parametrize(
    ("misuse", "text"),
    [
        (lambda s, w: bool(s), "an int32 scalar as a Python condition"),
        (lambda s, w: int(s), "where Python needs an integer"),
        (lambda s, w: range(s), r"write nl\.fori_loop\(lower, upper, body\)"),
        (lambda s, w: 1 if s > 2 else 0, "comparing int32 scalars as a Python condition"),
        (lambda s, w: s in (1, 2), "comparing int32 scalars as a Python condition"),
        (lambda s, w: (s == 2) + 1, r"\+ on the result of a comparison"),
        (lambda s, w: nl.fori_loop(0, s < 2, lambda i: None), "upper is the result of comparing"),
        (lambda s, w: nl.fori_loop(0, w, lambda i: None), "upper is an int64 scalar"),
        (lambda s, w: w < 2, r"int64 has \+, - and \* only"),
        (lambda s, w: s + w, r"int32 \+ int64: the scalars must have the same dtype"),
        (lambda s, w: s + 2**31, "the integer does not fit int32"),
        (lambda s, w: s + 1.0, r"\+ float: allowed are Python integers"),
        (lambda s, w: s * nisa.register_alloc(1), r"\* VirtualRegister: allowed"),
        (lambda s, w: s // 2, r"the operators \+, - and \* only"),
        (lambda s, w: 2 << s, r"the operators \+, - and \* only"),
        (lambda s, w: nl.zeros((2, 8), nl.float32)[:, w], "is an int64 scalar; allowed: an int32"),
        (lambda s, w: nisa.register_move(nisa.register_alloc(), s), "src is an int32 scalar"),
        (lambda s, w: nisa.scalar_store(nl.zeros((1, 1), nl.int32), 3), "value is int; allowed"),
        (lambda s, w: nisa.scalar_store(nl.zeros((1, 1), nl.int32), w), "the widths must agree"),
        (lambda s, w: nisa.scalar_load(nl.zeros((1, 1), nl.uint32)), "dtype uint32; allowed"),
        (lambda s, w: nisa.scalar_load(nl.zeros((1, 2), nl.int32)), "one element"),
        (lambda s, w: nl.ndarray((1, 2), nl.int64), "int64; allowed on chip: one element"),
        (lambda s, w: nl.copy(nl.zeros((1, 1), nl.int64)), "do not compute with"),
        (
            lambda s, w: nisa.dma_copy(nl.ndarray((1, 1), nl.int32), nl.zeros((1, 1), nl.int64)),
            "a cast of int64 to int32",
        ),
    ],
)
def test_what_a_scalar_is_not_for_is_named(misuse: Any, text: str) -> None:
    @nki.jit
    def kernel(x: Any, wide: Any) -> None:
        misuse(nisa.scalar_load(x), nisa.scalar_load(wide))

    with pytest.raises(NkiValidationError, match=rf"{text}.*test_scalars.py:\d+\)"):
        kernel(one(2), one(2, "int64"))


@pytest.mark.parametrize("misuse", [bool, int, float, range, lambda s: s // 2, lambda s: [0][s]])
def test_python_that_needs_the_value_is_a_type_error(misuse: Any) -> None:
    @nki.jit
    def kernel(x: Any) -> None:
        misuse(nisa.scalar_load(x))

    with pytest.raises(TypeError):
        kernel(one(2))


def test_an_int64_tile_is_moved_and_filled_as_it_is() -> None:
    @nki.jit
    def kernel(x: Any) -> Any:
        out = nl.ndarray((2, 1), dtype=nl.int64, buffer=nl.shared_hbm)
        tile = nl.ndarray((1, 1), dtype=nl.int64)
        nisa.dma_copy(tile, x)
        nisa.dma_copy(out[0:1], tile)
        nisa.memset(tile, -(2**60))
        nisa.dma_copy(out[1:2], tile)
        return out

    value = 2**53 + 1  # no double
    assert kernel(one(value, "int64")).tolist() == [[value], [-(2**60)]]


def test_scalars_may_be_asked_whether_they_are_there() -> None:
    @nki.jit
    def kernel(x: Any) -> Any:
        scalar = nisa.scalar_load(x)
        return [scalar == None, scalar != None, scalar == "name"]  # noqa: E711  # as kernels ask

    assert kernel(one(2)) == [False, True, False]


def test_state_of_python_in_a_scalar_expression_is_found_in_a_loop() -> None:
    factors = iter(range(1, 9))

    @nki.jit
    def kernel(x: Any) -> None:
        scalar = nisa.scalar_load(x)

        def body(i: Any) -> None:
            scalar * next(factors)

        nl.fori_loop(0, 3, body)

    with pytest.raises(NkiValidationError, match=r"other=2.*instead of 1"):
        kernel(one(2))


def test_a_partly_written_int64_tensor_is_known_by_element() -> None:
    @nki.jit
    def kernel(column: Any) -> Any:
        out = nl.ndarray((2, 2), dtype=nl.int64, buffer=nl.shared_hbm)
        for row in range(2):
            for i in range(2):
                if (row, i) != (1, column):
                    nisa.dma_copy(out[row : row + 1, i : i + 1], nl.zeros((1, 1), nl.int64))
        nisa.dma_copy(nl.ndarray((1, 1), nl.int64), out[1:2, 0:1])
        return None

    kernel(1)
    with pytest.raises(NkiValidationError, match="1 of 1 elements that nothing has written"):
        kernel(0)
