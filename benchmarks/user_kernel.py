"""Kernels, arguments and references of the user's own files, and what the model says of a call."""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from segattn.benchmarks.kernels.cost_report import model_bands
from segattn.benchmarks.launch_summary import launch_rows
from segattn.reference.nki.cost.constants import BASE, CostConstants
from segattn.reference.nki.cost.result import CostResult
from segattn.reference.nki.trace import Trace

_LOADED: dict[Path, ModuleType] = {}


class UserCodeError(ValueError):
    """Code of the user's file failed; the cause is what it raised."""


def load_object(place: str) -> Any:
    """What `FILE.py::name` names. ValueError naming the file, the line or the missing name.

    A file is run once, and finds the modules beside it.
    """
    file, separator, name = place.partition("::")
    path = Path(file).resolve()
    if not separator or not name:
        raise ValueError(f"{place!r}: must be FILE.py::name")
    if not path.is_file():
        raise ValueError(f"{place!r}: {file} is not a file")
    if path not in _LOADED:
        _LOADED[path] = _run(path)
    try:
        return getattr(_LOADED[path], name)
    except AttributeError as error:
        names = [n for n, value in vars(_LOADED[path]).items() if callable(value) and n[0] != "_"]
        raise ValueError(f"{place!r}: {file} has no {name!r}, only {', '.join(names)}") from error


def _run(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"_user_{path.stem}_{len(_LOADED)}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path}: must be a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise user_error(path, error) from error
    finally:
        sys.path.remove(str(path.parent))
    return module


def user_error(path: Path, error: Exception | SystemExit) -> UserCodeError:
    """One line that names the place in the user's file where `error` came from."""
    line, trace = getattr(error, "lineno", None), error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    place = path.name if line is None else f"{path.name}:{line}"
    return UserCodeError(f"{place}: {type(error).__name__}: {error}")


@dataclass(frozen=True)
class Modelled:
    """One call: what it returned, and its launches by band."""

    outputs: tuple[Any, ...]
    launches: list[dict[str, CostResult]]
    rows: list[dict[str, Any]]


def model_call(
    kernel: Callable[..., Any], arguments: Mapping[str, Any], constants: CostConstants = BASE
) -> Modelled:
    """Run a call on the interpreter and model its launches. ValueError when there are none."""
    with Trace() as trace:
        output = kernel(**arguments)
    if not trace.launches:
        raise ValueError(f"{kernel!r}: launched no NKI kernel, is it decorated with nki.jit?")
    launches = [model_bands(launch, constants) for launch in trace.launches]
    outputs = output if isinstance(output, tuple) else (output,)
    return Modelled(outputs, launches, launch_rows(launches))


def bound_arguments(kernel: Any, given: Any, place: str) -> dict[str, Any]:
    """Arguments by parameter name, from a dict or a sequence. ValueError when they do not fit."""
    function = getattr(kernel, "function", kernel)
    try:
        if isinstance(given, Mapping):
            return dict(inspect.signature(function).bind(**given).arguments)
        if isinstance(given, Sequence):
            return dict(inspect.signature(function).bind(*given).arguments)
    except TypeError as error:
        raise ValueError(f"{place}: {error} of {function.__name__}") from error
    raise ValueError(f"{place}: gave {type(given).__name__}, must be a dict, list or tuple")


def array_of(text: str, rng: np.random.Generator) -> tuple[str, Any]:
    """Name and random array of `name=128,512:bfloat16` (float32 without a type).

    Integers are drawn from 0 to 7. ValueError for anything else.
    """
    name, _, rest = text.partition("=")
    dims, _, dtype_name = rest.partition(":")
    try:
        shape = tuple(int(dim) for dim in dims.split(","))
        dtype = np.dtype(getattr(ml_dtypes, dtype_name or "float32", dtype_name or "float32"))
    except (TypeError, ValueError) as error:
        raise ValueError(f"--shape {text}: must be NAME=SIZE,SIZE:DTYPE ({error})") from error
    if not name.isidentifier() or min(shape) < 1 or np.prod(shape) > 1 << 30:
        raise ValueError(f"--shape {text}: needs a name and sizes from 1, at most 2**30 elements")
    if dtype.kind in "iu":
        return name, rng.integers(0, 8, shape).astype(dtype)
    return name, rng.standard_normal(shape, np.float32).astype(dtype)


def relative_error(actual: Any, expected: Any) -> float:
    """Relative L2 error; infinite for another shape, or where only one of them is NaN."""
    a, e = (np.asarray(x).astype(np.float64) for x in (actual, expected))
    if a.shape != e.shape or not np.array_equal(np.isnan(a), np.isnan(e)):
        return float("inf")
    real = ~np.isnan(e)
    return float(np.linalg.norm(a[real] - e[real]) / (np.linalg.norm(e[real]) or 1.0))
