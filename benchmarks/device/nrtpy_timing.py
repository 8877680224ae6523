"""Times a kept NEFF with AWS's nrtpy: a script for the Python environment that has nrtpy.

nrtpy and nki cannot share an environment, so this imports NumPy and nrtpy only:

    python nrtpy_timing.py CALL_FOLDER [--warm-up 10] [--iterations 100] [--trace]

reads `arguments.npz` and `neff/kernel.neff`, and writes `timing.json` with the device time of each
iteration in microseconds; `--trace` also writes `nrtpy.ntff` for neuron-explorer.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

RAW_DTYPES = {"bfloat16": "uint16", "float8_e4m3": "uint8", "float8_e5m2": "uint8"}
"""NumPy dtypes of the same size for those that only ml_dtypes has."""


def load_inputs(folder: Path) -> dict[str, NDArray[Any]]:
    """Arrays of `arguments.npz` (see `device.save_arrays`) by kernel parameter name."""
    inputs: dict[str, NDArray[Any]] = {}
    with np.load(folder / "arguments.npz") as stored:
        for key in stored.files:
            name, _, part = key.rpartition(".")
            if part == "dtype":
                dtype = str(stored[key])
                raw = stored[f"{name}.bytes"].view(RAW_DTYPES.get(dtype, dtype))
                inputs[name] = raw.reshape(tuple(stored[f"{name}.shape"]))
    return inputs


def input_names(expected: list[str], given: list[str]) -> dict[str, str]:
    """Name in the NEFF -> kernel parameter: equal, or the parameter followed by a suffix.

    KeyError names an input of the NEFF that no argument fits.
    """
    names = {}
    for name in expected:
        fitting = [g for g in given if name == g or name.startswith((f"{g}_", f"{g}."))]
        if not fitting:
            raise KeyError(f"the NEFF's input {name!r} fits none of the arguments {given}")
        names[name] = max(fitting, key=len)
    return names


def time_call(folder: Path, warm_up: int, iterations: int, trace: bool) -> list[float]:
    """Device time of each iteration in microseconds."""
    from nrtpy import NrtpyModel, NrtpyTensor

    model = NrtpyModel.load_from_neff(folder / "neff" / "kernel.neff")
    arrays = load_inputs(folder)
    names = input_names(list(model.input_tensors_info), list(arrays))
    tensors = {
        name: NrtpyTensor.from_numpy(arrays[argument], name=name)
        for name, argument in names.items()
    }
    stats = model.benchmark(
        inputs=tensors, warmup_iter=warm_up, benchmark_iter=iterations, mode="device"
    )
    if trace:
        model(inputs=tensors, save_trace=True, ntff_name=str(folder / "nrtpy.ntff"))
    return [1e3 * float(ms) for ms in stats.durations_ms]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--trace", action="store_true")
    options = parser.parse_args()
    times = time_call(options.folder, options.warm_up, options.iterations, options.trace)
    (options.folder / "timing.json").write_text(json.dumps({"device_us": times}))


if __name__ == "__main__":
    main()
