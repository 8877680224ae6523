"""Runs one kernel of a third party and compares it with that party's reference."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from segattn.reference import nki
from segattn.reference.nki.errors import NkiValidationError
from segattn.reference.nki.strict import strict
from segattn.tests.checks.peers.release_06 import old_names

Inputs = Mapping[str, Any] | Sequence[Any]


class PeerMismatchError(AssertionError):
    """A result is further from the reference than the third party's own tolerance."""


@dataclass
class Comparison:
    """The largest difference relative to the largest reference value, and what strictness found:
    the message of each rule that refused the kernel, and the rules that warned.
    """

    error: float = 0.0
    refused: dict[str, str] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)


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

    Where one of TOLERATED refuses the kernel, that is noted in `comparison` and the kernel runs
    again with that rule at "warn": an element that nothing has written is then NaN, so that it did
    no harm if the outputs agree with the reference. A kernel that uses what 0.7 removed is noted
    under REMOVED and runs again with it.
    """
    launch = kernel if hasattr(kernel, "__getitem__") else nki.jit(kernel)
    levels: dict[str, Any] = {}
    while True:
        try:
            old = old_names() if REMOVED in comparison.refused else nullcontext()
            with strict(**levels), warnings.catch_warnings(record=True) as seen, old:
                warnings.simplefilter("always")
                copies = [_copies(values) for values in inputs]
                results = nki.run_ranks(launch[cores], copies)
                found = {_rule(warning.message) for warning in seen}
                comparison.warned |= found - {"", *comparison.refused}
                return [_arrays(result) for result in results]
        except NkiValidationError as error:
            rule = _rule(error)
            if rule not in TOLERATED or rule in levels:
                raise
            comparison.refused[rule] = str(error)
            levels[rule] = "warn"
        except AttributeError as error:
            if "removed in 0.7.0" not in str(error) or REMOVED in comparison.refused:
                raise
            comparison.refused[REMOVED] = str(error)


REMOVED = "removed in 0.7"
"""What KNOWN calls the names of 0.6 that 0.7 does not have."""
TOLERATED = ("core_race", "uninitialized_read", "capacity", "purity")
"""Rules that judge what a compiler or the order of events makes of a kernel, not its values."""


def _rule(message: Warning | Exception | str) -> str:
    """The rule that an error or a warning of the interpreter names, "" for others."""
    return str(message).rpartition("[rule ")[2].rstrip("]").partition(",")[0]


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
