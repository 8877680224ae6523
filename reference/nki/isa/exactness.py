"""Rule "inexact_integer": integers in fp32 arithmetic, which holds 24 bits of them.

Beyond 2**24 some integers have a float32 and some do not; only what is lost is reported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from ..dtypes import INTEGERS, WIDE_INTEGERS, Array
from ..errors import NkiValidationError
from ..strict import level, violation

EXACT: Final = 2**24
_KEEPS_24_BITS: Final = WIDE_INTEGERS | {"float32"}
_INSTEAD: Final = (
    "use tensor_tensor on int32/uint32 tiles in SBUF (exact on GpSimd), bitwise operators, or "
    "smaller values"
)


def check_exact(array: Array, shadow: Array, instruction: str, operand: str) -> None:
    """Whether 32-bit integers survived as the float32 values `shadow`."""
    if level("inexact_integer") == "off":
        return
    lossy = shadow.astype(np.int64) != array
    if lossy.any():
        value = int(array[lossy].reshape(-1)[0])
        violation(
            "inexact_integer",
            f"{instruction}: operand {operand} holds {value}, which fp32 arithmetic cannot "
            f"represent (24 bits); {_INSTEAD}",
        )


def check_immediate(value: float, instruction: str, operand: str) -> None:
    """Whether an immediate beyond 2**24 survives as the float32 that the engine takes."""
    if not isinstance(value, (int, np.integer)):
        if np.isinf(np.float32(value)) and not np.isinf(value):
            raise NkiValidationError(
                f"{instruction}: {operand} is {value!r}, which is no float32; allowed: up to "
                f"+-{np.finfo(np.float32).max:.8g}, or infinity"
            )
        return
    value = int(value)
    if int(np.float32(value)) != value:
        violation(
            "inexact_integer",
            f"{instruction}: {operand} is {value}, which becomes the fp32 constant "
            f"{int(np.float32(value))} (24 bits); {_INSTEAD}",
        )


def check_exact_result(
    values: Array, dtype: str, instruction: str, exactly: Callable[[], Array]
) -> None:
    """Whether fp32 results that go to a 32-bit integer tile are those of `exactly()` in fp64."""
    if dtype not in WIDE_INTEGERS or level("inexact_integer") == "off":
        return
    if values.size and np.abs(values).max() > EXACT:
        _report(values, exactly(), instruction)


def _report(values: Array, exact: Array, instruction: str) -> None:
    with np.errstate(all="ignore"):
        lossy = (np.rint(exact) != np.rint(values)) & (np.abs(exact) > EXACT)
    if lossy.any():
        value = int(exact[lossy].reshape(-1)[0])
        violation(
            "inexact_integer",
            f"{instruction}: an integer result is {value}, beyond the 2**24 up to which fp32 "
            f"arithmetic represents every integer; {_INSTEAD}",
        )


def check_exact_sums(data: Array, source: str, dtype: str, op: str, instruction: str) -> None:
    """Whether the running sums or products of integers, along the last axis, fit fp32."""
    if (
        source not in INTEGERS
        or dtype not in _KEEPS_24_BITS
        or op not in _ACCUMULATE
        or level("inexact_integer") == "off"
    ):
        return
    wide = data.astype(np.float64)
    if op != "multiply" and np.abs(wide).sum(axis=-1).max(initial=0) <= EXACT:
        return
    with np.errstate(all="ignore"):
        running = _ACCUMULATE[op].accumulate(wide, axis=-1)
        _report(running.astype(np.float32), running, instruction)


_ACCUMULATE: Final = {"add": np.add, "subtract": np.add, "average": np.add, "multiply": np.multiply}
