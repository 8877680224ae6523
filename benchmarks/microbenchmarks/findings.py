"""Questions to the hardware that the values of one run answer, not its time."""

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from segattn.benchmarks.microbenchmarks.sheet import Arguments, Array, trip_count

_BF16 = np.dtype(ml_dtypes.bfloat16)


def _denormal_inputs() -> Arguments:
    """exp(-90), 2^-120 * 2^-20 and 2^-128 + 2^-128 are denormal, exp(-30000) is zero."""
    x = np.empty((128, 4), np.float32)
    x[:] = (-90.0, 2.0**-120, 2.0**-128, -30000.0)
    return {"x": x}


def _denormal_findings(arguments: Arguments, result: Array) -> dict[str, bool]:
    names = ("scalar_engine_exp", "vector_engine_product", "vector_engine_inputs")
    zero = [bool((result[:, i] == 0).all()) for i in range(4)]
    flushes = {f"{name}_flushes": zero[i] for i, name in enumerate(names)}
    return {**flushes, "exp_of_minus_30000_is_zero": zero[3]}


def _group_inputs() -> Arguments:
    """Small integers: every product and sum is exact."""
    return {"x": np.random.default_rng(0).integers(-4, 5, (128, 512)).astype(_BF16)}


def _group_findings(arguments: Arguments, result: Array) -> dict[str, bool]:
    x = arguments["x"].astype(np.float64)
    halves = [4 * x[:, c : c + 128].T @ x[:, c + 128 : c + 256] for c in (0, 256)]
    exact = np.array_equal(result.astype(np.float64), np.concatenate(halves, axis=1))
    return {"interleaved_groups_in_one_bank_are_exact": bool(exact)}


def _trip_inputs() -> Arguments:
    """Small integers, and three trips."""
    x = np.random.default_rng(0).integers(-4, 5, (128, 256)).astype(_BF16)
    return {"x": x, "trips": trip_count(3)}


def _trip_findings(arguments: Arguments, result: Array) -> dict[str, bool]:
    x = arguments["x"].astype(np.float64)
    exact = np.array_equal(result.astype(np.float64), 4 * x[:, :128].T @ x[:, 128:])
    return {"psum_accumulates_over_loop_trips": bool(exact)}


@dataclass(frozen=True)
class Finding:
    """A question that the values of one run answer."""

    kernel: str
    arguments: Callable[[], Arguments]
    answers: Callable[[Arguments, Array], dict[str, bool]]


FINDINGS = (
    Finding("denormal_kernel", _denormal_inputs, _denormal_findings),
    Finding("interleaved_groups_kernel", _group_inputs, _group_findings),
    Finding("accumulating_trips_kernel", _trip_inputs, _trip_findings),
)
