"""Runs and times one NKI kernel launch on a Neuron device, by AWS's documented tools.

A *call* is a folder with everything about one launch: `call.json` (kernel, scalar arguments),
`arguments.npz`, after compiling `neff/kernel.neff` and `outputs.npz`, after timing `timing.json`.
Compiling and timing run in processes of their own: `NKI_ARTIFACTS_DIR` must be set before nki is
imported, and AWS's timing library nrtpy cannot share an environment with nki.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

WARM_UP = 10
ITERATIONS = 100
TIMING_SCRIPT = Path(__file__).with_name("nrtpy_timing.py")


class DeviceError(RuntimeError):
    """A device, a tool or a step of a measurement is missing or failed; the text says which."""


@dataclass(frozen=True)
class Timing:
    """Measured device times of one launch, in microseconds."""

    p50_us: float
    p99_us: float
    min_us: float
    iterations: int


def add_device_options(parser: argparse.ArgumentParser, calls: Path) -> None:
    """Where a measurement keeps its calls, and which Python times them."""
    parser.add_argument(
        "--calls",
        type=Path,
        default=calls,
        help="device: folder that keeps NEFFs, inputs and timings",
    )
    parser.add_argument(
        "--nrtpy-python",
        type=Path,
        default=Path("nrtpy_venv/bin/python"),
        help="device: Python of the environment with AWS's nrtpy",
    )


def require_nki() -> None:
    """DeviceError unless AWS's nki is there.

    From here on this process runs kernels on the interpreter: what it measures, children compile.
    """
    os.environ["SEGATTN_BACKEND"] = "interpreter"
    # Imported late: the backend is chosen when the kernels are imported first.
    from segattn.kernels.backend import SDK_HINT, aws_nki

    if aws_nki() is None:
        raise DeviceError(f"AWS's nki is not installed: {SDK_HINT}")


def require_device() -> None:
    """DeviceError unless a Neuron device and AWS's nki are there."""
    os.environ["SEGATTN_BACKEND"] = "interpreter"
    from segattn.kernels.backend import neuron_device_present

    if not neuron_device_present():
        raise DeviceError(
            "there is no Neuron device here (/dev/neuron0): --backend device needs a trn2 "
            "instance; --backend interpreter prints modelled times, --backend compile asks AWS's "
            "compiler"
        )
    require_nki()


def save_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays by name; low-precision dtypes are kept as bytes next to their names."""
    stored: dict[str, Array] = {}
    for name, array in arrays.items():
        contiguous = np.ascontiguousarray(array)
        stored[f"{name}.dtype"] = np.array(array.dtype.name)
        stored[f"{name}.shape"] = np.array(array.shape, np.int64)
        stored[f"{name}.bytes"] = contiguous.reshape(-1).view(np.uint8)
    np.savez(path, **stored)  # type: ignore[arg-type]  # names never equal savez's own keyword


def load_arrays(path: Path) -> dict[str, Array]:
    """Arrays that `save_arrays` wrote, in their order."""
    with np.load(path) as stored:
        names = [key.removesuffix(".dtype") for key in stored.files if key.endswith(".dtype")]
        loaded = {}
        for name in names:
            dtype_name = str(stored[f"{name}.dtype"])
            dtype = np.dtype(getattr(ml_dtypes, dtype_name, dtype_name))
            shape = tuple(stored[f"{name}.shape"])
            loaded[name] = stored[f"{name}.bytes"].view(dtype).reshape(shape)
    return loaded


def save_call(
    folder: Path, kernel: str, arguments: Mapping[str, Any], num_cores: int | None = None
) -> None:
    """Describe one launch: "module:function" inside the package, or "FILE.py::function"."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
    scalars = {name: value for name, value in arguments.items() if name not in arrays}
    save_arrays(folder / "arguments.npz", arrays)
    described = {
        "kernel": kernel,
        "order": list(arguments),
        "scalars": scalars,
        "num_cores": num_cores,
    }
    (folder / "call.json").write_text(json.dumps(described, indent=1))


def load_call(folder: Path) -> tuple[str, dict[str, Any], int | None]:
    """(kernel, arguments in order, number of cores) of a call."""
    described = json.loads((folder / "call.json").read_text())
    arrays = load_arrays(folder / "arguments.npz")
    scalars = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in described["scalars"].items()
    }
    values = {**scalars, **arrays}
    arguments = {name: values[name] for name in described["order"]}
    return described["kernel"], arguments, described["num_cores"]


def _run(command: Sequence[str], environment: Mapping[str, str], step: str) -> None:
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-15:])
        raise DeviceError(f"{step} failed with status {done.returncode}:\n{tail}")


def _launch(folder: Path, lnc: int, backend: str, step: str) -> None:
    """Call the kernel of a call with AWS's nki in a process of its own, compiled for trn2."""
    environment = {
        "SEGATTN_BACKEND": backend,
        "NKI_ARTIFACTS_DIR": str(folder / "neff"),
        "NEURON_PLATFORM_TARGET_OVERRIDE": "trn2",
        "NEURON_LOGICAL_NC_CONFIG": str(lnc),
        "NKI_DEBUG_INFO": "True",
    }
    command = [sys.executable, "-m", "segattn.benchmarks.device.launch", str(folder)]
    _run(command, environment, f"{step} {folder.name}")


def compile_only(folder: Path, lnc: int = 1) -> Path:
    """Compile a call for trn2 on a machine without a device; its NEFF.

    AWS's nki keeps the NEFF although running it fails then; DeviceError if there is none.
    """
    neff = folder / "neff" / "kernel.neff"
    neff.unlink(missing_ok=True)
    try:
        # "device" would ask for one; the kernel is called by itself, not simulated.
        _launch(folder, lnc, "simulator", "compiling")
    except DeviceError:
        if not neff.exists():
            raise
    if not neff.exists():
        raise DeviceError(f"compiling {folder.name} left no {neff}")
    return neff


def compile_and_run(folder: Path, lnc: int = 1) -> dict[str, Array]:
    """Compile a call for trn2 and run it once on the device; its results by position.

    Keeps `neff/kernel.neff` and `outputs.npz` in the folder.
    """
    _launch(folder, lnc, "device", "compiling and running")
    return load_arrays(folder / "outputs.npz")


def measure(folder: Path, nrtpy_python: Path, iterations: int = ITERATIONS) -> Timing:
    """Time the kept NEFF of a call with nrtpy, in the Python that has it."""
    command = [
        str(nrtpy_python),
        str(TIMING_SCRIPT),
        str(folder),
        f"--warm-up={WARM_UP}",
        f"--iterations={iterations}",
    ]
    _run(command, {}, f"timing {folder.name}")
    samples = np.array(json.loads((folder / "timing.json").read_text())["device_us"])
    p50, p99 = np.percentile(samples, (50, 99))
    return Timing(float(p50), float(p99), float(samples.min()), len(samples))


def profile_commands(folder: Path) -> list[list[str]]:
    """neuron-explorer commands that capture the second execution of a NEFF and summarise it."""
    neff, profile = folder / "neff" / "kernel.neff", folder / "profile.ntff"
    capture = [
        "neuron-explorer", "capture", "-n", str(neff), "-s", str(profile),
        "--profile-nth-exec=2", "--enable-dge-notifs",
    ]  # fmt: skip
    view = [
        "neuron-explorer", "view", "-n", str(neff), "-s", str(profile),
        "--output-format", "summary-json",
    ]  # fmt: skip
    return [capture, view]


def profile(folder: Path) -> None:
    """Run `profile_commands`; the summary lands in `profile_summary.json`."""
    capture, view = profile_commands(folder)
    _run(capture, {}, f"profiling {folder.name}")
    done = subprocess.run(view, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise DeviceError(f"neuron-explorer view failed: {done.stderr.strip()}")
    (folder / "profile_summary.json").write_text(done.stdout)
