"""Makes the test support of third-party NKI repositories importable on a laptop.

Their tests import clients of a device farm at load time, and `neuron_dtypes`, which only AWS's
index has. The clients become empty modules where they are missing; the part of `neuron_dtypes`
that tests use is written here on top of ml_dtypes.
"""

import builtins
import importlib.util
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from segattn.reference import nki

ALIAS_SUFFIX = ".must_alias_input"
# Modules of the checkout itself that drive the device farm: always replaced.
FARM_MODULES = ("test.utils.test_orchestrator",)
FARM_CLIENTS = (
    "aws_embedded_metrics",
    "boto3",
    "botocore",
    "fabric2",
    "paramiko",
    "plotext",
    "pytest_html",
    "torch_xla",
)

_SPECIAL_TYPES = {
    "bfloat16": ml_dtypes.bfloat16,
    "tfloat32": np.float32,
    "float8_e4m3": ml_dtypes.float8_e4m3,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e8m0fnu": ml_dtypes.float8_e8m0fnu,
    "bool_": np.bool_,
}


_TRN3_TYPES = ("float8_e5m2_x4", "float8_e4m3fn_x4", "float4_e2m1fn_x4")


def add_missing_modules() -> None:
    """Provide the modules named above that are not installed."""
    if importlib.util.find_spec("neuron_dtypes") is None:
        sys.modules["neuron_dtypes"] = _neuron_dtypes()
    if importlib.util.find_spec("torch_neuronx") is None:
        sys.modules["torch_neuronx"] = ModuleType("torch_neuronx")
        vars(sys.modules["torch_neuronx"])["nki_jit"] = nki.jit
    missing = [name for name in FARM_CLIENTS if importlib.util.find_spec(name) is None]
    sys.meta_path.append(_EmptyModules(missing))
    sys.modules.update({name: _EmptyModule(name) for name in FARM_MODULES})


class _EmptyModules(MetaPathFinder, Loader):
    """Finds the given modules and everything below them, with any name inside."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not any(fullname == name or fullname.startswith(f"{name}.") for name in self.names):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing runs."""


class _EmptyModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Exception,), {})


class _Inputs(dict[str, Any]):
    """Kernel inputs in which an aliased input is found under its plain name too."""

    def __missing__(self, name: str) -> Any:
        if name.endswith(ALIAS_SUFFIX):
            raise KeyError(name)
        return self[name + ALIAS_SUFFIX]


def bridge_upstream_faults() -> None:
    """Let two test files of nki-library run in spite of their own faults.

    test_qkv_tkg.py uses Platforms without importing it; test_gen_mask_tkg.py reads an aliased
    input by a name without the suffix that it is stored under.
    """
    vars(builtins)["Platforms"] = import_module("test.utils.common_dataclasses").Platforms
    framework = import_module("test.utils.unit_test_framework").UnitTestFramework
    original = framework.__init__

    def with_aliases(self: Any, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        generate = self.kernel_input_generator
        self.kernel_input_generator = lambda config: _Inputs(generate(config))

    framework.__init__ = with_aliases


def numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the NumPy dtype for a NumPy, ml_dtypes or NKI dtype (whose name is a string)."""
    name = str(getattr(dtype, "name", dtype)).rpartition(".")[2]
    found: np.dtype[Any] = np.dtype(_SPECIAL_TYPES.get(name, dtype))
    return found


def _neuron_dtypes() -> ModuleType:
    module = ModuleType("neuron_dtypes", "What the tests need of AWS's package of this name.")
    vars(module).update(
        static_cast=_static_cast,
        sizeinbytes=lambda dtype: numpy_dtype(dtype).itemsize,
        finfo=_finfo,
        is_float_type=_is_float_type,
        **_SPECIAL_TYPES,
        # Packed types of trn3: tests compare dtypes with them.
        **{
            f"{name}_x4": f"{name}_x4" for name in ("float8_e5m2", "float8_e4m3fn", "float4_e2m1fn")
        },
    )
    return module


def _finfo(dtype: Any) -> Any:
    return ml_dtypes.finfo(numpy_dtype(dtype))  # type: ignore[no-untyped-call]  # not annotated


def _static_cast(array: npt.ArrayLike, dtype: Any) -> npt.NDArray[Any]:
    return np.asarray(array).astype(numpy_dtype(dtype))


def _is_float_type(dtype: Any) -> bool:
    return "float" in numpy_dtype(dtype).name
