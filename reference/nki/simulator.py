"""`nki.simulator`: the entry point that vLLM Neuron's CPU mode calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .errors import NkiValidationError
from .launch import Kernel


def simulate_kernel(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    _lnc: int,
) -> Any:
    """Run a kernel on NumPy, torch (CPU) or JAX arrays and return its results.

    `_lnc` is the number of cores, 1 or 2; NkiValidationError for another number.
    """
    if _lnc not in (1, 2):
        raise NkiValidationError(f"simulate_kernel: _lnc {_lnc!r}; allowed on trn2: 1, 2")
    function = func.function if isinstance(func, Kernel) else func
    return Kernel(function, _lnc)(*args, **dict(kwargs or {}))
