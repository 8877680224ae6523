"""What the language guide lets a kernel take, and what the compiler refuses."""

from enum import Enum
from typing import Any

import numpy as np
import pytest

from segattn.reference import nki
from segattn.reference.nki.errors import NkiValidationError
from segattn.reference.nki.typing import tensor

nl: Any = nki.language
X = np.ones((2, 2), np.float32)


class _Mode(Enum):
    FAST = 1


class _Sizes(nki.language.NKIObject):
    def __init__(self) -> None:
        self.rows = 4


@nki.jit
def copy_kernel(x: Any, extra: Any) -> Any:
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nki.isa.dma_copy(out, x)
    return out


@pytest.fixture(autouse=True)
def refused_subset() -> Any:
    with nki.strict(subset="error"):
        yield


@pytest.mark.parametrize(
    "value",
    [None, True, -(2**31), 2**32 - 1, 1.5, float("-inf"), "auto", (1, (2, X)),
     {"a": X, "b": {"c": 1}},
     _Mode.FAST, _Sizes(), nl.float32, nl.sbuf, np.float32(2), np.int64(3), np.dtype("int8"),
     nl.abs],
)  # fmt: skip
def test_what_the_guide_lists_is_taken(value: Any) -> None:
    np.testing.assert_array_equal(copy_kernel(X, value), X)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2**40, "extra is 1099511627776; integers have 32 bits"),
        (-(2**31) - 1, "integers have 32 bits"),
        (1e300, "floats have 32 bits"),
        ({1: 2}, "extra has the key 1; keys of dicts are strings"),
        ({"a": {(1, 2): 3}}, r"a has the key \(1, 2\)"),
        ((1, {2, 3}), "a set; allowed: None, bool"),
        (b"x", "a bytes; allowed"),
        (1j, "a complex; allowed"),
        (range(3), "a range; allowed"),
        (slice(1, 2), "a slice; allowed"),
        (object(), "a object; allowed"),
        ([1, 2], "argument extra is a list"),
    ],
)
def test_what_the_compiler_refuses_is_refused(value: Any, text: str) -> None:
    with pytest.raises(NkiValidationError, match=rf"{text}.*\[rule subset\]"):
        copy_kernel(X, value)
    with nki.strict(subset="off"):
        np.testing.assert_array_equal(copy_kernel(X, value), X)


def test_a_declared_shape_is_the_only_one_that_is_taken() -> None:
    @nki.jit
    def kernel(x: tensor[4, 8]) -> Any:  # type: ignore[type-arg, valid-type]  # as NKI has it
        return x

    assert kernel(np.ones((4, 8), np.float32)).shape == (4, 8)
    with pytest.raises(NkiValidationError, match=r"'x' has shape \(4, 9\); .* declares \(4, 8\)"):
        kernel(np.ones((4, 9), np.float32))


def test_an_argument_of_a_dtype_without_name_in_nki_is_named() -> None:
    @nki.jit
    def kernel(x: Any) -> Any:
        return x

    with pytest.raises(NkiValidationError, match=r"argument 'x': dtype .*float64.* is not an NKI"):
        kernel(np.ones((4, 8)))
