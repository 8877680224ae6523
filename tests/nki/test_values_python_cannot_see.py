"""Registers and tensor elements in Python: their values exist on the device only."""

from typing import Any

import numpy as np
import pytest

from segattn.reference import nki
from segattn.reference.nki.errors import NkiValidationError, OutOfBoundsError
from segattn.tests.nki.running import floats

# the tests pass wrong types on purpose
nl: Any = nki.language
nisa: Any = nki.isa


def _is_set(register: Any) -> bool:
    return bool(register > 0)


@pytest.mark.parametrize(
    ("misuse", "text"),
    [
        (lambda r: 1 if r else 0, "as a Python condition"),
        (lambda r: not r, "as a Python condition"),
        (lambda r: r and True, "as a Python condition"),
        (lambda r: _is_set(r), "no Python operators"),
        (lambda r: r == 2, "no Python operators"),
        (lambda r: r != 2.0, "no Python operators"),
        (lambda r: r in [1, 2], "no Python operators"),
        (lambda r: r + 1, "no Python operators"),
        (lambda r: 4 - r, "no Python operators"),
        (lambda r: max(r, 1), "no Python operators"),
        (lambda r: int(r), "where Python needs an integer"),
        (lambda r: float(r), "where Python needs an integer"),
        (lambda r: range(r), r"as a bound of range\(\); write nl\.fori_loop"),
        (lambda r: [1.0, 2.0, 3.0][r], "where Python needs an integer"),
        (lambda r: nl.zeros((2, 4), dtype=nl.float32)[:, 0:r], "where Python needs an integer"),
        (lambda r: nl.ndarray((2, r), dtype=nl.float32), "where Python needs an integer"),
        (lambda r: nl.ds(0, r), "where Python needs an integer"),
        (lambda r: nisa.memset(nl.ndarray((2, 2), dtype=nl.float32), r), "allowed: a number"),
        (lambda r: nisa.register_alloc(r), "allowed: None or an integer"),
    ],
)
def test_a_register_has_no_value_in_python(misuse: Any, text: str) -> None:
    @nki.jit
    def kernel() -> None:
        misuse([nisa.register_alloc(2)][0])

    with pytest.raises(NkiValidationError, match=text) as caught:
        kernel()
    assert "test_values_python_cannot_see.py:" in str(caught.value)
    assert isinstance(caught.value, TypeError) or "a number" in text


def test_a_loop_body_cannot_ask_for_its_trip() -> None:
    @nki.jit
    def kernel() -> None:
        def body(i: Any) -> None:
            if i == 0:
                pass

        nl.fori_loop(0, 2, body)

    with pytest.raises(
        NkiValidationError, match=r"comparing int32 scalars as a Python condition.*fori_loop"
    ):
        kernel()


def test_whether_there_is_a_register_or_tensor_may_be_asked() -> None:
    @nki.jit
    def kernel(x: Any) -> Any:
        register, missing = nisa.register_alloc(1), None
        flags = (register != None, register == None, x != None, missing == None)  # noqa: E711  # NKI has no `is`
        return [*flags, x == x, register == "name", x == "name", bool(x)]  # its identity

    assert kernel(floats(1, 1)) == [True, False, True, True, True, False, False, True]


def test_a_while_on_a_register_says_what_to_write() -> None:
    @nki.jit
    def kernel() -> None:
        register = nisa.register_alloc(3)
        while register:
            pass

    with pytest.raises(TypeError, match=r"write nl\.while_loop\(init, body\)"):
        kernel()


@pytest.mark.parametrize(
    "view",
    [
        lambda x, i: x[i],
        lambda x, i: x[i, :],
        lambda x, i: x[nl.ds(i, 1)].reshape((8,)),
        lambda x, i: x.select(0, i),
        lambda x, i: x.ap([[1, 8]], scalar_offset=i, indirect_dim=0),
    ],
)
def test_a_register_addresses_a_tensor(view: Any) -> None:
    x = floats(4, 8)

    @nki.jit
    def kernel(x: Any, row: Any) -> Any:
        out = nl.ndarray((8,), dtype=x.dtype, buffer=nl.shared_hbm)
        register = nisa.register_alloc()
        nisa.register_load(register, nl.load(row))
        nisa.dma_copy(out, view(x, register))
        return out

    np.testing.assert_array_equal(kernel(x, np.array([[2]], np.int32)), x[2])
    with pytest.raises(OutOfBoundsError, match=r"(scalar offset|run-time index) 4 "):
        kernel(x, np.array([[4]], np.int32))


@pytest.mark.parametrize(
    ("index", "text"),
    [
        (lambda t, r: t[r], "partition dimension of on-chip tensors"),
        (lambda t, r: t[nl.ds(r, 2)], "partition dimension of on-chip tensors"),
        (lambda t, r: t[:, nl.ds(r, 9)], "sizes 1..8"),
        (lambda t, r: t[:, r][:, r], "already"),
    ],
)
def test_a_run_time_index_is_one_free_dimension(index: Any, text: str) -> None:
    @nki.jit
    def kernel() -> None:
        index(nl.zeros((4, 8), dtype=nl.float32), nisa.register_alloc(0))

    with pytest.raises(NkiValidationError, match=text):
        kernel()


@pytest.mark.parametrize(
    ("misuse", "text"),
    [
        (lambda t: 1 if t[0, 0] else 0, "an element of tensor 'tile' is used as a Python cond"),
        (lambda t: not t[0:1, 0:1], "an element of tensor 'tile' is used as a Python cond"),
        (lambda t: t[0, 0] == 0.0, "no Python operators"),
        (lambda t: t != t[0:1], "no Python operators"),
        (lambda t: t < 3, "no Python operators"),
        (lambda t: t in (1, 2), "no Python operators"),
        (lambda t: max(t, t[0:1]), "no Python operators"),
        (list, "is not iterable; use range"),
        (np.sum, "NumPy cannot read tensor 'tile'"),
        (lambda t: float(t[0, 0]), "not 'NkiTensor'"),
        (lambda t: range(t[0, 0]), "'NkiTensor' object cannot be interpreted as an integer"),
    ],
)
def test_the_values_of_a_tensor_are_not_for_python(misuse: Any, text: str) -> None:
    @nki.jit
    def kernel() -> None:
        tile = nl.zeros((2, 2), dtype=nl.float32, name="tile")
        misuse(tile)

    with pytest.raises(TypeError, match=text) as caught:
        kernel()
    assert ".py:" in str(caught.value)


def test_an_immediate_of_a_register_has_32_bits() -> None:
    @nki.jit
    def kernel(value: int) -> None:
        nisa.register_move(nisa.register_alloc(), value)

    kernel(2**32 - 1)
    with pytest.raises(NkiValidationError, match=r"4294967296 does not fit a 32-bit register"):
        kernel(2**31 * 2)


def test_a_shape_is_of_integers() -> None:
    @nki.jit
    def kernel() -> None:
        nl.ndarray((2, 1.5), dtype=nl.float32)

    with pytest.raises(NkiValidationError, match="allowed: integers"):
        kernel()
