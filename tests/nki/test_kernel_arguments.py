"""What a kernel takes besides tensors, and what its declaration promises."""

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


class _Sizes:
    def __init__(self) -> None:
        self.rows = 4


@nki.jit
def copy_kernel(x: Any, extra: Any) -> Any:
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nki.isa.dma_copy(out, x)
    return out


@pytest.mark.parametrize(
    "value",
    [None, True, 2**40, 1.5, float("-inf"), 1e300, "auto", b"x", (1, (2, X)), [1, 2], {1, 2},
     {"a": X, "b": {"c": 1}}, {(1, 2): 3}, range(3), slice(1, 2), object(),
     _Mode.FAST, _Sizes(), nl.float32, nl.sbuf, np.float32(2), np.int64(3), np.dtype("int8"),
     nl.abs],
)  # fmt: skip
def test_any_python_value_is_an_argument(value: Any) -> None:
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
