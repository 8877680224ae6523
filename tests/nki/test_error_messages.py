"""What a newcomer's mistakes are answered with: every message says what to write instead."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from segattn.reference import nki
from segattn.reference.nki.errors import NkiValidationError
from segattn.tests.nki.running import floats

nl, nisa = nki.language, nki.isa
X = floats(64, 32)


def _run(body: Callable[[Any], object]) -> None:
    @nki.jit
    def kernel(x: Any) -> None:
        body(x)

    with nki.strict(purity="off"):
        kernel(X)


def _add_strings(x: Any) -> None:
    tile = nl.load(x)
    nisa.tensor_tensor(tile, tile, tile, "add")


def _numpy_function(x: Any) -> None:
    tile = nl.load(x)
    nisa.activation(tile, np.exp, tile)


def _divide(x: Any) -> None:
    tile = nl.load(x)
    nisa.tensor_tensor(tile, tile, tile, nl.divide)


def _column(x: Any) -> None:
    tile = nl.load(x)
    nisa.tensor_tensor(tile, tile, tile[:, 0:1], nl.add)


def _plus(x: Any) -> None:
    tile = nl.load(x)
    tile + tile


def _every_second_partition(x: Any) -> None:
    tile = nl.load(x)
    nisa.tensor_copy(nl.ndarray((32, 32), dtype=nl.float32), tile[::2])


def _every_second_partition_by_pattern(x: Any) -> None:
    tile = nl.load(x)
    nisa.tensor_copy(nl.ndarray((32, 32), dtype=nl.float32), tile.ap([[64, 32], [1, 32]]))


def _integers_that_fp32_cannot_add(x: Any) -> None:
    tile = nl.full((64, 4), 2**24 - 1, dtype=nl.int32)
    odd = nl.full((64, 4), 2**23, dtype=nl.int32)
    nisa.tensor_tensor(tile, tile, odd, nl.add, engine=nisa.engine.vector)


def _nothing(x: Any) -> None:
    nisa.dma_copy(nl.ndarray((1, 32), dtype=nl.float32), x[3:3])


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (_add_strings, r"op is the string 'add', pass nl.add; allowed"),
        (_numpy_function, r"'exp' of numpy, pass an operator of nl; allowed"),
        (_divide, r"nl.divide, which the device does not have \(multiply by nisa.reciprocal\)"),
        (_column, r"must agree; nisa.tensor_scalar takes a column"),
        (_plus, r"tensor 'tile' has no Python operators; use nisa.tensor_tensor"),
        (np.exp, r"NumPy cannot read tensor 'x'.* use nisa instructions"),
        (list, r"tensor 'x' is not iterable; use range\(64\)"),
        (_every_second_partition, r"operand src 'tile' steps over 2 partitions.* use dma_copy"),
        (_every_second_partition_by_pattern, r"operand src 'tile' steps over 2 partitions"),
        (_integers_that_fp32_cannot_add, r"result is 25165823.* use tensor_tensor on int32"),
        (
            _nothing,
            r"3:3 selects nothing of dimension 0 of 'x', whose size is 64: .*leave the instr",
        ),
    ],
)
def test_a_mistake_is_answered_with_what_to_write_and_where(body: Any, text: str) -> None:
    with pytest.raises(NkiValidationError, match=rf"(?s){text}.*test_error_messages.py:\d+\)"):
        _run(body)


def test_dma_takes_every_second_partition() -> None:
    found: list[Any] = []

    def body(x: Any) -> None:
        tile = nl.ndarray((32, 32), dtype=nl.float32)
        nisa.dma_copy(tile, nl.load(x)[::2])
        found.append(tile.numpy())

    _run(body)
    np.testing.assert_array_equal(found[0], X[::2])


def test_of_equally_near_keywords_the_first_is_meant() -> None:
    def body(x: Any) -> None:
        tile = nl.load(x)
        nisa.tensor_scalar(tile, tile, op=nl.add, operand0=1.0)  # type: ignore[call-arg]

    with pytest.raises(TypeError, match=r"unexpected keyword argument 'op': use op0= \(at "):
        _run(body)
