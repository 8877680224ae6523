"""The compile gate, `segattn bench kernels --backend compile`: every row through neuronx-cc.

It needs AWS's SDK but no device: compiler and its instruction simulator together have predicted
what the chip takes. Error codes that our table of field rules knows are explained.
"""

import argparse
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from inspect import signature
from time import perf_counter
from typing import Any

import numpy as np

from segattn.benchmarks.device.calls import (
    DeviceError,
    compile_only,
    require_nki,
    save_call,
)
from segattn.benchmarks.kernels.targets import Target
from segattn.benchmarks.kernels.workloads import Workload
from segattn.reference.nki.rules import explain

PREFILL = ("padded_prefill", "segmented_attention")
"""Functions that have an exact softmax beside the one of the row: its fallback."""


def require_compiler() -> None:
    """DeviceError unless AWS's nki and neuronx-cc are there."""
    require_nki()
    if shutil.which("neuronx-cc") is None:
        raise DeviceError("neuronx-cc is not on the PATH: --backend compile needs AWS's compiler")


def prepared(workload: Workload, **options: Any) -> Any:
    """The launch of a workload, `segattn.kernels.Launch`; cache writes take one core."""
    if workload.kernel == "write_kv_cache":
        options = {}
    prepare = getattr(import_module("segattn.kernels"), f"prepare_{workload.kernel}")
    return prepare(**workload.arguments(np.random.default_rng(0)), **options)


def kernel_name(launch: Any) -> str:
    """Where the kernel is, "module:function" inside the package."""
    function = launch.kernel.function
    return f"{function.__module__.removeprefix('segattn.')}:{function.__name__}"


def named_arguments(launch: Any) -> dict[str, Any]:
    """The kernel's arguments by parameter name, in its order."""
    return dict(signature(launch.kernel.function).bind(*launch.arrays).arguments)


def _launches(target: Target, lnc: int) -> Iterator[tuple[str, Any]]:
    """What a row compiles, with a label each."""
    work = target.workload
    yield work.label, prepared(work, lnc=lnc)
    if work.kernel in PREFILL:
        yield f"{work.label}, exact", prepared(work, lnc=lnc, softmax="exact")


def explanations(error: str) -> list[str]:
    """What the table of field rules says of the compiler's error codes in a text."""
    return [
        f"{code}: rule {row.name}: {row.what}. Legal: {row.twin}"
        for code in dict.fromkeys(re.findall(r"NCC_[A-Z]+[0-9]+", error))
        for row in explain(code)
    ]


def run_compiled(targets: Sequence[Target], options: argparse.Namespace) -> int:
    """Compile every row; 1 if one is refused. DeviceError without the SDK."""
    require_compiler()
    refused = 0
    for target in targets:
        for label, launch in _launches(target, options.lnc):
            folder = options.calls / label.translate(str.maketrans("/ ,()", "_____"))
            save_call(folder, kernel_name(launch), named_arguments(launch), launch.grid)
            begin = perf_counter()
            try:
                compile_only(folder, launch.grid)
            except DeviceError as error:
                refused += 1
                print(f"{label}: REFUSED: {error}")
                for line in explanations(str(error)):
                    print(f"    {line}")
            else:
                print(f"{label}: compiled in {perf_counter() - begin:.0f} s")
            sys.stdout.flush()
    return 1 if refused else 0
