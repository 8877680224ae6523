"""nki.jit and nki.simulate: run a kernel on one core (or two, kernel[2])."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from . import trace
from .arguments import Arguments
from .compiler import CompileConfig, SpecializationConfig
from .core import RUN, Core
from .errors import NkiValidationError, locate
from .lnc import CorePair
from .purity import check_unchanged, outside_of
from .strict import new_launch, violation
from .tensor import NkiTensor
from .typing import TensorShape


class Kernel:
    """A kernel function.

    `kernel(args)` runs on as many cores as NEURON_LOGICAL_NC_CONFIG says (1 without it),
    `kernel[n](args)` on n = 1 or 2, which must be that number where the variable is set.
    """

    def __init__(self, function: Callable[..., Any], num_cores: int | None = None) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.num_cores = num_cores

    def __getitem__(self, num_cores: Any) -> Kernel:
        """The kernel on a grid of cores; trn2 has 1 or 2 per logical core."""
        if isinstance(num_cores, tuple) and len(num_cores) == 1:
            num_cores = num_cores[0]
        if not isinstance(num_cores, int) or num_cores not in (1, 2):
            raise NkiValidationError(
                f"kernel[{num_cores}]: the grid is one number; allowed on trn2: 1, 2"
            )
        return Kernel(self.function, num_cores)

    def with_schedule(self, edges: Any) -> Kernel:
        """Scheduling edges by instruction name; program order satisfies them here."""
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run. Inside another kernel it is a plain call."""
        if RUN.core is not None:
            return self.function(*args, **kwargs)
        return _launch(self, args, kwargs)


def jit(
    fn: Callable[..., Any] | None = None,
    *,
    compile_config: CompileConfig | None = None,
    specialization_config: SpecializationConfig | None = None,
    **kwargs: Any,
) -> Any:
    """Decorator that makes a function a kernel.

    The two records of `nki.compiler` do not change what a kernel computes. TypeError if they are
    something else; other keywords are for frameworks.
    """
    for given, record in (
        (compile_config, CompileConfig),
        (specialization_config, SpecializationConfig),
    ):
        if given is not None and not isinstance(given, record):
            raise TypeError(f"nki.jit: {given!r} is no nki.compiler.{record.__name__}")
    if "platform_target" in kwargs:
        raise NkiValidationError(
            "nki.jit(platform_target=...) was removed in 0.3.0; the target is trn2"
        )
    if "mode" in kwargs:
        violation("deprecated", "nki.jit(mode=...) is ignored since 0.3.0; leave it out")
    if fn is None:
        return lambda function: jit(function, **kwargs)
    return fn if isinstance(fn, Kernel) else Kernel(fn)


def simulate(kernel: Any) -> Callable[..., Any]:
    """A callable that runs the kernel on NumPy arrays (or torch, JAX) and returns the results."""
    return kernel if isinstance(kernel, Kernel) else Kernel(kernel)


def _launch(kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Bind the arrays, run on every core, check, and convert the results."""
    new_launch()
    signature = inspect.signature(kernel.function)
    bound = signature.bind(*args, **kwargs)
    arguments = Arguments()
    for name, value in bound.arguments.items():
        given = bound.arguments[name] = arguments.bind(value, name)
        declared = signature.parameters[name].annotation
        if isinstance(declared, TensorShape) and isinstance(given, NkiTensor):
            declared.check(name, given.shape)
    outside = outside_of(kernel.function, bound.arguments.values())
    num_cores = _num_cores(kernel)
    if trace.active is not None:
        trace.active.launch(kernel.function.__name__, num_cores)

    has_grid = kernel.num_cores is not None

    def body() -> Any:
        return kernel.function(*bound.args, **bound.kwargs)

    if num_cores == 2:
        storages = [storage for storage, _, _ in arguments.tensors]
        outcome = CorePair(storages, has_grid).run(body)[0]
    else:
        outcome = _run_one_core(body, has_grid)
    check_unchanged(outside, kernel.function.__name__)
    arguments.copy_back()
    return arguments.result(outcome)


def _num_cores(kernel: Kernel) -> int:
    """The cores of a launch; NkiValidationError where the grid differs from the variable."""
    text = os.environ.get(_DEGREE)
    if text is None:
        return kernel.num_cores or 1
    if text not in ("1", "2"):
        raise NkiValidationError(f"{_DEGREE}={text!r}; allowed on trn2: 1, 2")
    degree = int(text)
    if kernel.num_cores not in (None, degree):
        raise NkiValidationError(
            f"kernel {kernel.function.__name__}[{kernel.num_cores}] with {_DEGREE}={degree}: the "
            "compiler refuses a kernel of another degree (NCC_EVRF066, with device loops "
            "NCC_IXGM002); launch it without a grid"
        )
    return degree


_DEGREE: Final = "NEURON_LOGICAL_NC_CONFIG"


def _run_one_core(body: Callable[[], Any], has_grid: bool) -> Any:
    core = Core(0, 1, has_grid)
    RUN.core = core
    try:
        with np.errstate(all="ignore"):
            outcome = body()
            core.finish()
    except (NkiValidationError, TypeError, AttributeError) as error:
        locate(error)
        raise
    finally:
        RUN.core = None
    return outcome
