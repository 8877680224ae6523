"""A kernel is traced by plain Python: whatever Python can do, a kernel may do.

Every kernel doubles, adds or scales by numbers that only come out right if the construct has the
meaning it has in Python; the expected arrays are worked out by hand.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import pytest

from segattn.reference import nki

nl, nisa = nki.language, nki.isa
X = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture(autouse=True)
def default_rules() -> Iterator[None]:
    with nki.strict(**nki.DEFAULT_LEVELS):
        yield


class Step(Protocol):
    def run(self, tile: Any) -> None: ...


@dataclass(frozen=True)
class Scale:
    factor: float = 2.0
    history: list[float] = field(default_factory=list)

    def run(self, tile: Any) -> None:
        nisa.tensor_scalar(tile, tile, nl.multiply, self.factor)

    @property
    def doubled(self) -> float:
        return 2 * self.factor


class ScaleAndAdd(Scale):
    def run(self, tile: Any) -> None:
        super().run(tile)
        nisa.tensor_scalar(tile, tile, nl.add, 1.0)


class Pair(NamedTuple):
    first: float
    second: float


@cache
def cached(factor: float) -> Scale:
    return Scale(factor)


@contextmanager
def stored(x: Any, out: Any) -> Iterator[Any]:
    tile = nl.load(x)
    yield tile
    nisa.dma_copy(out, tile)


def rows(x: Any) -> Iterator[tuple[int, Any]]:
    for i in range(x.shape[0]):
        yield i, x[i : i + 1]


def scale(tile: Any, *, factor: float) -> None:
    nisa.tensor_scalar(tile, tile, nl.multiply, factor)


def generator(x: Any, out: Any) -> None:
    pipeline = ((i, nl.load(row)) for i, row in rows(x))
    for i, tile in pipeline:
        scale(tile, factor=float(i + 1))
        nisa.dma_copy(out[i : i + 1], tile)


def comprehension(x: Any, out: Any) -> None:
    tiles = {(i, 0): nl.load(x[i : i + 1]) for i in range(3)}
    factors = [float(row + 1) for row, _ in tiles]
    for i, tile in enumerate(tiles.values()):
        scale(tile, factor=factors[i])
        nisa.dma_copy(out[i : i + 1], tile)


def inheritance(x: Any, out: Any) -> None:
    steps: list[Step] = [ScaleAndAdd(3.0), cached(2.0)]
    with stored(x, out) as tile:
        for step in steps:
            step.run(tile)


def functions(x: Any, out: Any) -> None:
    total = 0.0

    def count(amount: float) -> None:
        nonlocal total
        total += amount

    for amount in Pair(first=1.0, second=2.0):
        count(amount)
    add: Callable[..., Any] = partial(
        nisa.tensor_scalar, op0=nl.add, operand0=(lambda value: -value)(total)
    )
    with stored(x, out) as tile:
        add(tile, data=tile)


def control_flow(x: Any, out: Any) -> None:
    tile = None
    try:
        raise KeyError("factor")
    except KeyError as error:
        match error.args:
            case ("factor",):
                factor = Scale().doubled
            case _:
                factor = 0.0
    finally:
        tile = nl.load(x)
    if (n := len({*range(3)})) is not None:
        first, *_ = sorted((factor, float(n + 9)), reverse=True)
    scale(tile, factor=first)
    nisa.dma_copy(out, tile)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (generator, X * np.array([[1], [2], [3]])),
        (comprehension, X * np.array([[1], [2], [3]])),
        (inheritance, (3 * X + 1) * 2),
        (functions, X - 3),
        (control_flow, 12 * X),
    ],
)
def test_python_means_in_a_kernel_what_it_means_outside(body: Any, expected: Any) -> None:
    @nki.jit
    def kernel(x: Any, *, copy: bool = True) -> Any:
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        body(x, out)
        return out if copy else None

    np.testing.assert_array_equal(kernel(X, copy=True), expected)
