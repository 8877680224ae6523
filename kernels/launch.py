"""A kernel call in two halves: what is launched, and what is made of its results.

A `prepare_...` function checks its arguments and returns a Launch, `run` launches it, and
`launched` makes the public function that is the two in sequence.
`launch.kernel[launch.grid](*launch.arrays)` is the raw call of the kernel.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Generic, ParamSpec, TypeVar, get_args

from . import backend

P = ParamSpec("P")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Launch(Generic[Result]):
    """A checked and prepared kernel call."""

    kernel: Any
    """A `@nki.jit` kernel."""
    grid: int
    """Physical cores it runs on: 1 or 2."""
    arrays: tuple[Any, ...]
    """The kernel's arguments in its order: NumPy arrays, numbers and tuples of them, None."""
    finish: Callable[[Any], Result]
    """The public function's result from the kernel's; may launch again where that is needed."""


def execute(launch: Launch[Any]) -> Any:
    """What the kernel returns. HBM arguments that it writes change in place."""
    return backend.run(launch.kernel, launch.grid, *launch.arrays)


def run(launch: Launch[Result]) -> Result:
    """What the public function returns."""
    return launch.finish(execute(launch))


def launched(prepare: Callable[P, Launch[Result]]) -> Callable[P, Result]:
    """The public function of a `prepare_...` function: it takes the same, and runs the launch."""

    @wraps(prepare)
    def function(*args: P.args, **kwargs: P.kwargs) -> Result:
        return run(prepare(*args, **kwargs))

    function.__name__ = function.__qualname__ = prepare.__name__.removeprefix("prepare_")
    signature = inspect.signature(prepare, eval_str=True)
    result = get_args(signature.return_annotation)[0]
    function.__signature__ = signature.replace(return_annotation=result)  # type: ignore[attr-defined]
    return function
