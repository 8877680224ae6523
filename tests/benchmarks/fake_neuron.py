"""A trn2 instance out of text files: what the benchmarks use of AWS's `nki`, `nrtpy` and
`neuron-explorer`, by their documented names. Kernels run on the interpreter.
"""

import os
import sys
from pathlib import Path

SITE = """
import pathlib

_glob = pathlib.Path.glob


def glob(self, pattern, *rest, **options):
    if str(self) == "/dev" and pattern.startswith("neuron"):
        return iter([self / "neuron0"])
    return _glob(self, pattern, *rest, **options)


pathlib.Path.glob = glob
"""

NKI = """
import json
import os
import sys
from pathlib import Path

from segattn.reference import nki as interpreter
from segattn.reference.nki import isa, language

sys.modules["nki.language"] = language
sys.modules["nki.isa"] = isa
ARTIFACTS = os.environ.get("NKI_ARTIFACTS_DIR")
KEPT = ("NEURON_PLATFORM_TARGET_OVERRIDE", "NEURON_LOGICAL_NC_CONFIG", "NKI_DEBUG_INFO")


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel
        self.function = kernel.function

    def __getitem__(self, cores):
        return Compiled(self.kernel[cores])

    def __call__(self, *arguments):
        import inspect

        import numpy as np

        fault = os.environ.get("FAKE_FAULT", "")
        if fault == f"compile {self.function.__name__}":
            raise RuntimeError("[NCC_EXTP003] too many instructions")
        if fault == f"loop {self.function.__name__}":
            raise RuntimeError("[NCC_IBIR092] Live-in location is not in DRAM")
        bound = inspect.signature(self.function).bind(*arguments).arguments
        names = [name for name, value in bound.items() if isinstance(value, np.ndarray)]
        folder = Path(ARTIFACTS)
        folder.mkdir(parents=True, exist_ok=True)
        environment = {name: os.environ[name] for name in KEPT}
        (folder / "kernel.neff").write_text(json.dumps([names, environment]))
        if not any(Path("/dev").glob("neuron*")):
            raise RuntimeError("nrt_init failed: no device")
        results = self.kernel(*arguments)
        if fault == f"result {self.function.__name__}":
            results[:] = 0
        return results


def jit(function):
    return Compiled(interpreter.jit(function))
"""

NRTPY = """
import json


class NrtpyTensor:
    @classmethod
    def from_numpy(cls, array, name=None):
        tensor = cls()
        tensor.name = name
        return tensor


class BenchmarkResult:
    def __init__(self, durations_ms):
        self.durations_ms = durations_ms


class NrtpyModel:
    @classmethod
    def load_from_neff(cls, path):
        model = cls()
        names, _ = json.loads(path.read_text())
        model.input_tensors_info = dict.fromkeys(names)
        return model

    def benchmark(self, inputs, outputs=None, warmup_iter=5, benchmark_iter=5, mode="device"):
        assert set(inputs) == set(self.input_tensors_info)
        assert all(name == tensor.name for name, tensor in inputs.items())
        assert (warmup_iter, mode) == (10, "device")
        return BenchmarkResult([0.001 * (i + 1) for i in range(benchmark_iter)])
"""

EXPLORER = """#!/bin/sh
[ "$1" = capture ] && exec touch "$5"
echo '{"total_time": 1}'
"""


def _script(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def instance(folder: Path, fault: str = "", device: bool = True) -> tuple[dict[str, str], Path]:
    """Environment of a process on such an instance, and the Python that has nrtpy.

    Without a device there are `nki` and `neuronx-cc`.

    `fault`: "compile KERNEL" or "result KERNEL" names a kernel function that fails or is wrong.
    """
    nki, nrtpy, programs = (folder / name for name in ("nki_venv", "nrtpy_venv", "bin"))
    for each in (nki / "nki", nrtpy, programs):
        each.mkdir(parents=True)
    if device:
        (nki / "sitecustomize.py").write_text(SITE)
    (nki / "nki" / "__init__.py").write_text(NKI)
    (nrtpy / "nrtpy.py").write_text(NRTPY)
    _script(programs / "neuron-explorer", EXPLORER)
    _script(programs / "neuronx-cc", "#!/bin/sh\n")
    python = _script(
        nrtpy / "python", f'#!/bin/sh\nPYTHONPATH="{nrtpy}" exec "{sys.executable}" "$@"\n'
    )
    environment = {k: v for k, v in os.environ.items() if k != "SEGATTN_BACKEND"}
    paths = [str(nki), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    environment["PATH"] = f"{programs}{os.pathsep}{environment['PATH']}"
    environment["FAKE_FAULT"] = fault
    return environment, python
