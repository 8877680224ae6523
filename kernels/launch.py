"""A kernel call in two halves: what is launched, and what is made of its results.

A `prepare_...` function checks its arguments and returns a Launch, `run` launches it, and the
public functions are the two in sequence. `launch.kernel[launch.grid](*launch.arrays)` is the raw
call of the kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from . import backend

Result = TypeVar("Result")


@dataclass(frozen=True)
class Launch(Generic[Result]):
    """A checked and prepared kernel call."""

    kernel: Any
    """A `@nki.jit` kernel."""
    grid: int
    """Physical cores it runs on: 1 or 2."""
    arrays: tuple[Any, ...]
    """The kernel's arguments in its order: NumPy arrays, numbers, None."""
    finish: Callable[[Any], Result]
    """The public function's result from the kernel's; may launch again where that is needed."""


def execute(launch: Launch[Any]) -> Any:
    """What the kernel returns. HBM arguments that it writes change in place."""
    return backend.run(launch.kernel, launch.grid, *launch.arrays)


def run(launch: Launch[Result]) -> Result:
    """What the public function returns."""
    return launch.finish(execute(launch))
