"""Which `nki` runs the kernels: the only file that knows.

SEGATTN_BACKEND, read once when `segattn.kernels` is first imported, is one of

    auto         device if a Neuron device and the SDK are there, else interpreter (the default)
    device       AWS's nki on a Neuron device
    simulator    AWS's nki, its CPU simulator `nki.simulate`
    interpreter  this project's NumPy interpreter, `segattn.reference.nki`

Kernel files import `nki`, `nl` and `nisa` from here and look like any other NKI file otherwise.
"""

import importlib
import os
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..reference import nki as interpreter

BACKENDS = ("auto", "device", "simulator", "interpreter")

SDK_HINT = (
    "install AWS's SDK with: pip install --upgrade nki neuronx-cc==2.* "
    "--extra-index-url=https://pip.repos.neuron.amazonaws.com"
)


def neuron_device_present() -> bool:
    """Whether the Neuron driver shows a device."""
    return any(Path("/dev").glob("neuron[0-9]*"))


def aws_nki() -> ModuleType | None:
    """AWS's `nki`, or None when it is absent.

    The package of this name on PyPI is a placeholder that raises ImportError on import, and
    `segattn.reference.nki.install()` registers the interpreter under the name: both are absence.
    """
    try:
        module = importlib.import_module("nki")
    except ImportError:
        return None
    return None if module.__name__ == interpreter.__name__ else module


def select(requested: str) -> tuple[str, ModuleType]:
    """The backend that `requested` stands for and its `nki`.

    ValueError for an unknown name, ImportError with the install line when the SDK is needed but
    absent, RuntimeError when a device is needed but absent.
    """
    if requested not in BACKENDS:
        raise ValueError(f"SEGATTN_BACKEND={requested!r}: must be one of {', '.join(BACKENDS)}")
    if requested == "interpreter" or (requested == "auto" and not neuron_device_present()):
        return "interpreter", interpreter
    module = aws_nki()
    if module is None:
        if requested == "auto":
            return "interpreter", interpreter
        raise ImportError(
            f"SEGATTN_BACKEND={requested} needs AWS's nki, which is absent: {SDK_HINT}"
        )
    if requested == "device" and not neuron_device_present():
        raise RuntimeError("SEGATTN_BACKEND=device: there is no Neuron device (/dev/neuron0)")
    return ("device" if requested == "auto" else requested), module


if TYPE_CHECKING:
    from ..reference import nki
    from ..reference.nki import isa as nisa
    from ..reference.nki import language as nl

    BACKEND: str
else:
    BACKEND, nki = select(os.environ.get("SEGATTN_BACKEND", "auto"))
    nl = importlib.import_module(f"{nki.__name__}.language")
    nisa = importlib.import_module(f"{nki.__name__}.isa")


FIELD_RULES: dict[str, interpreter.Level] = {"field": "error", "loop_skip": "off"}
"""Levels while one of this project's kernels runs: it keeps every rule that devices have taught
(docs/field_rules.md) but one, which a single project reported and another of its kernels
contradicts: a decode of several batches leaves out idle lanes of its gathers (docs/decisions.md).
"""


def run(kernel: Any, lnc: int, *args: Any) -> Any:
    """Run a `@nki.jit` kernel on `lnc` physical cores, on NumPy arrays.

    HBM arguments that it writes change in place.
    """
    if lnc == 2:
        kernel = kernel[2]
    if BACKEND == "simulator":
        return nki.simulate(kernel)(*args)
    with interpreter.strict(**FIELD_RULES):
        return kernel(*args)


__all__ = ["BACKEND", "nisa", "nki", "nl", "run"]
