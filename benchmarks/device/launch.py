"""Runs one saved call with AWS's nki on the device: `python -m segattn.benchmarks.device.launch`.

Started by `device.compile_and_run`, with `NKI_ARTIFACTS_DIR` set before anything imports nki.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np

from segattn.benchmarks.device.calls import load_call, save_arrays
from segattn.benchmarks.user_kernel import load_object


def main(folder: Path) -> None:
    """Run the call in `folder` and write its results, by position, to `outputs.npz`."""
    kernel_name, arguments, num_cores = load_call(folder)
    if "::" in kernel_name:
        kernel: Any = load_object(kernel_name)
    else:
        module, _, function = kernel_name.partition(":")
        kernel = getattr(importlib.import_module(f"segattn.{module}"), function)
    results = (kernel if num_cores is None else kernel[num_cores])(*arguments.values())
    if not isinstance(results, tuple):
        results = (results,)
    save_arrays(
        folder / "outputs.npz", {str(i): np.asarray(value) for i, value in enumerate(results)}
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
