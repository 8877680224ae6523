"""Runs one kernel of a third party and compares it with that party's reference."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from segattn.reference import nki
from segattn.reference.nki.errors import CoreRaceError, UninitializedReadError
from segattn.reference.nki.strict import strict

Inputs = Mapping[str, Any] | Sequence[Any]


class PeerMismatchError(AssertionError):
    """A result is further from the reference than the third party's own tolerance."""


@dataclass
class Comparison:
    """The largest difference relative to the largest reference value, and what strictness found.

    `race` and `unwritten` are the messages of the rules, empty when they had nothing to say.
    """

    error: float = 0.0
    race: str = ""
    unwritten: str = ""


@dataclass
class PeerResult:
    """One case: `status` is passed, failed or skipped; `reason` is empty for passed."""

    case: str
    status: str
    seconds: float
    comparison: Comparison
    reason: str = ""


def run_kernel(
    kernel: Callable[..., Any],
    inputs: Sequence[Inputs],
    cores: int,
    comparison: Comparison,
) -> list[list[npt.NDArray[Any]]]:
    """Run a kernel on copies of the inputs of each rank and return each rank's outputs in order.

    A race between the two cores, or a read of elements that nothing has written, is noted in
    `comparison`, and the kernel then runs with that rule at "warn": such elements are NaN, so they
    did no harm if the outputs agree with the reference.
    """
    launch = kernel if hasattr(kernel, "__getitem__") else nki.jit(kernel)

    def call() -> list[Any]:
        return nki.run_ranks(launch[cores], [_copies(values) for values in inputs])

    try:
        results = call()
    except (CoreRaceError, UninitializedReadError) as error:
        race = isinstance(error, CoreRaceError)
        comparison.race = str(error) if race else ""
        comparison.unwritten = "" if race else str(error)
        levels: dict[str, Any] = {"core_race" if race else "uninitialized_read": "warn"}
        with strict(**levels), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results = call()
    return [_arrays(result) for result in results]


def _copies(values: Inputs) -> Inputs:
    if isinstance(values, Mapping):
        return {name: _copy(value) for name, value in values.items()}
    return [_copy(value) for value in values]


def _arrays(result: Any) -> list[npt.NDArray[Any]]:
    outputs = result if isinstance(result, tuple | list) else [result]
    return [np.asarray(output) for output in outputs if output is not None]


def _copy(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


def compare(
    name: str,
    actual: npt.NDArray[Any],
    expected: npt.NDArray[Any],
    rtol: float,
    atol: float,
    comparison: Comparison,
) -> None:
    """Compare by the rule of nki-library: |a - b| <= atol + rtol * max|b|.

    Raises PeerMismatchError, also for NaN where the reference has none.
    """
    a = np.asarray(actual).astype(np.float32).reshape(expected.shape)
    b = np.asarray(expected).astype(np.float32)
    scale = float(np.max(np.abs(b), initial=0.0, where=np.isfinite(b)))
    with np.errstate(invalid="ignore"):
        difference = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    largest = float(np.max(difference, initial=0.0))
    relative = largest / scale if scale else largest
    comparison.error = max(comparison.error, relative)
    if not largest <= atol + rtol * scale:
        wrong = int(np.count_nonzero(~(difference <= atol + rtol * scale)))
        raise PeerMismatchError(
            f"{name}: largest difference {largest:.3g} of {scale:.3g}, allowed "
            f"{atol + rtol * scale:.3g}; {wrong} of {a.size} elements are outside"
        )
