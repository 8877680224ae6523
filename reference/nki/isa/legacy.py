"""Keywords of NKI 0.2 that third-party kernels still pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from ..strict import violation

Instruction = TypeVar("Instruction", bound=Callable[..., Any])


def hides_dtype(function: Instruction) -> Instruction:
    """Decorator: the parameter `dtype` is accepted but no part of the documented signature."""
    signature = inspect.signature(function)
    visible = [p for name, p in signature.parameters.items() if name != "dtype"]
    function.__signature__ = signature.replace(parameters=visible)  # type: ignore[attr-defined]  # read by inspect
    return function


def ignore_dtype(instruction: str, dtype: object) -> None:
    """Report `dtype=`: the destination's dtype decides."""
    if dtype is not None:
        violation(
            "deprecated",
            f"{instruction}: dtype= was removed; the dtype of dst decides, leave it out",
        )
