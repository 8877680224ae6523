"""The device side of the benchmarks, as far as it goes without a device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from segattn.benchmarks.device import launch as device_launch
from segattn.benchmarks.device import nrtpy_timing
from segattn.benchmarks.device.calls import (
    DeviceError,
    load_arrays,
    load_call,
    measure,
    profile_commands,
    require_device,
    save_arrays,
    save_call,
)
from segattn.benchmarks.device.kernels import (
    TOLERANCE,
    capture,
    reference_error,
)
from segattn.benchmarks.kernels.workloads import Prefill
from segattn.benchmarks.user_kernel import relative_error
from segattn.cli import main
from segattn.tests.benchmarks.fake_neuron import instance

FAKE_NRTPY = """
import numpy as np


class NrtpyTensor:
    def __init__(self, array):
        self.array = array

    @classmethod
    def from_numpy(cls, array, name=None):
        return cls(array)


class Stats:
    def __init__(self, durations_ms):
        self.durations_ms = durations_ms


class NrtpyModel:
    input_tensors_info = {"x_input": None, "scale": None}

    @classmethod
    def load_from_neff(cls, path):
        assert path.read_text() == "neff"
        return cls()

    def benchmark(self, inputs, warmup_iter, benchmark_iter, mode):
        assert (warmup_iter, mode) == (10, "device")
        assert inputs["x_input"].array.dtype == np.uint16
        assert inputs["x_input"].array.shape == (2, 3)
        return Stats([0.001 * (i + 1) for i in range(benchmark_iter)])
"""


@pytest.mark.parametrize("benchmark", ["kernels", "microbenchmarks"])
def test_without_a_device_the_command_says_so_and_exits_with_2(
    benchmark: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", benchmark, "--backend", "device"]) == 2
    assert "there is no Neuron device here" in capsys.readouterr().err
    with pytest.raises(DeviceError, match="needs a trn2 instance"):
        require_device()


def test_saved_arrays_come_back_with_dtype_shape_and_every_bit(tmp_path: Path) -> None:
    values = np.array([[1.5, np.nan, -0.0]], np.float32)
    arrays = {
        "a": values.astype(ml_dtypes.bfloat16),
        "b": values.astype(ml_dtypes.float8_e4m3),
        "c": np.arange(6, dtype=np.int32).reshape(3, 2).T,
        "d": np.zeros((0, 4), np.float32),
    }
    save_arrays(tmp_path / "arrays.npz", arrays)
    loaded = load_arrays(tmp_path / "arrays.npz")
    assert list(loaded) == list(arrays)
    for name, array in arrays.items():
        assert loaded[name].dtype == array.dtype
        assert loaded[name].shape == array.shape
        assert loaded[name].tobytes() == np.ascontiguousarray(array).tobytes()


def test_a_call_keeps_the_order_of_arrays_and_scalars(tmp_path: Path) -> None:
    save_call(tmp_path / "call", "m:f", {"scale": (2.0, None), "x": np.ones(3), "flag": True}, 2)
    kernel, arguments, num_cores = load_call(tmp_path / "call")
    assert (kernel, list(arguments), num_cores) == ("m:f", ["scale", "x", "flag"], 2)
    assert (arguments["scale"], arguments["flag"]) == ((2.0, None), True)


def test_a_captured_launch_replayed_from_its_folder_gives_the_same_result(tmp_path: Path) -> None:
    workload = Prefill(128, 32, q_heads=2, head_dim=64, block_size=16)
    launch, result = capture(workload)
    assert 0 < reference_error(workload, result) < 5e-3
    assert reference_error(workload, 1.02 * result.astype(np.float32)) > TOLERANCE
    assert launch.kernel == "kernels.device.segmented_attention_nki:segmented_attention_kernel"
    save_call(tmp_path, launch.kernel, launch.arguments, launch.num_cores)
    device_launch.main(tmp_path)
    outputs = load_arrays(tmp_path / "outputs.npz")
    assert len(outputs) == len(launch.results)
    for position, expected in enumerate(launch.results):
        assert outputs[str(position)].tobytes() == expected.tobytes()


def test_timing_reads_every_iteration_from_nrtpy(tmp_path: Path) -> None:
    library = tmp_path / "library"
    library.mkdir()
    (library / "nrtpy.py").write_text(FAKE_NRTPY)
    call = tmp_path / "call"
    x = np.ones((2, 3), ml_dtypes.bfloat16)
    save_call(call, "m:f", {"x": x, "scale": np.ones(1, np.float32)})
    (call / "neff").mkdir()
    (call / "neff" / "kernel.neff").write_text("neff")
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH="{library}" exec "{sys.executable}" "$@"\n')
    wrapper.chmod(0o755)
    timing = measure(call, wrapper)
    # 1 .. 100 us: the percentiles interpolate between neighbours.
    assert (timing.p50_us, timing.p99_us) == pytest.approx((50.5, 99.01))
    assert timing.min_us == pytest.approx(1.0)
    assert timing.iterations == 100


def test_an_input_of_the_neff_that_no_argument_fits_is_named() -> None:
    assert nrtpy_timing.input_names(["q_input", "k"], ["q", "k"]) == {"q_input": "q", "k": "k"}
    assert nrtpy_timing.input_names(["k_cache"], ["k", "k_cache"]) == {"k_cache": "k_cache"}
    with pytest.raises(KeyError, match="'table' fits none"):
        nrtpy_timing.input_names(["table"], ["q"])


def test_a_failing_step_shows_its_last_lines(tmp_path: Path) -> None:
    with pytest.raises(
        DeviceError, match=r"(?s)timing call failed with status 2.*can't open file"
    ) as e:
        measure(tmp_path / "call", _python_without_script(tmp_path))
    assert "call" in str(e.value)


def _python_without_script(tmp_path: Path) -> Path:
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path}/absent.py"\n')
    wrapper.chmod(0o755)
    return wrapper


def test_profiling_captures_the_second_execution(tmp_path: Path) -> None:
    capture_command, view_command = profile_commands(tmp_path)
    assert capture_command[:4] == [
        "neuron-explorer",
        "capture",
        "-n",
        str(tmp_path / "neff" / "kernel.neff"),
    ]
    assert "--profile-nth-exec=2" in capture_command
    assert view_command[-2:] == ["--output-format", "summary-json"]


SMALL_BENCH = """
import sys
from dataclasses import replace

from segattn.cli import main
from segattn.benchmarks.kernels import command as kernels
from segattn.benchmarks.kernels.targets import Target
from segattn.benchmarks.kernels.workloads import CacheWrite, Decode
from segattn.benchmarks.microbenchmarks import command as micro

kernels.TARGETS = Target(Decode(2, 128), 0.0, "hbm"), Target(CacheWrite(128), 0.0, "hbm")
chosen = [each for each in micro.SHEET if each.name in ("gather_transpose", "evict")]
micro.SHEET = [replace(each, points=each.points[:1]) for each in chosen]
micro.FINDINGS = ()
sys.exit(main(["bench", *sys.argv[1:]]))
"""


def _bench(
    tmp_path: Path, *arguments: str, fault: str = "", backend: str = "device"
) -> tuple["subprocess.CompletedProcess[str]", Path]:
    """`segattn bench ... --backend device` in a process on a made-up instance, and its folder."""
    environment, python = instance(tmp_path / "instance", fault, device=backend == "device")
    calls = tmp_path / "calls"
    options = ["--backend", backend, "--nrtpy-python", str(python), "--calls", str(calls)]
    done = subprocess.run(
        [sys.executable, "-c", SMALL_BENCH, *arguments, *options],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done, calls


def test_a_row_is_compiled_checked_timed_profiled_and_kept(tmp_path: Path) -> None:
    out = tmp_path / "measured.json"
    row = ("kernels", "--only", "decode", "--lnc", "2")
    done, calls = _bench(tmp_path, *row, "--profile", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "measured p50 50.5 us, p99 99.0 us" in done.stdout
    results = json.loads(out.read_text())
    (measured,) = results["rows"]
    assert results["kind"] == "measured"
    assert (measured["p50_us"], measured["p99_us"]) == pytest.approx((50.5, 99.01))
    assert (measured["iterations"], measured["num_cores"]) == (100, 2)
    assert measured["relative_error"] == 0
    assert 0 < measured["reference_error"] < 5e-3
    (call,) = calls.iterdir()
    kept = {"call.json", "arguments.npz", "neff", "outputs.npz", "timing.json"}
    assert {p.name for p in call.iterdir()} == kept | {"profile.ntff", "profile_summary.json"}
    _, environment = json.loads((call / "neff" / "kernel.neff").read_text())
    assert environment == {
        "NEURON_PLATFORM_TARGET_OVERRIDE": "trn2",
        "NEURON_LOGICAL_NC_CONFIG": "2",
        "NKI_DEBUG_INFO": "True",
    }


def test_a_row_that_fails_leaves_the_others(tmp_path: Path) -> None:
    out = tmp_path / "measured.json"
    rows = ("kernels", "--out", str(out))
    done, _ = _bench(tmp_path, *rows, fault="compile paged_decode_kernel")
    assert done.returncode == 1
    failed, written = json.loads(out.read_text())["rows"]
    assert "too many instructions" in failed["error"]
    assert (written["kernel"], written["relative_error"]) == ("write_kv_cache", 0)
    assert written["reference_error"] == 0


def test_a_wrong_result_is_told(tmp_path: Path) -> None:
    row = ("kernels", "--only", "decode")
    done, _ = _bench(tmp_path, *row, fault="result paged_decode_kernel")
    assert done.returncode == 1
    assert done.stdout.rstrip().endswith("WRONG")


def test_the_compile_gate_needs_no_device_and_explains_refusals(tmp_path: Path) -> None:
    done, calls = _bench(tmp_path, "kernels", fault="loop paged_decode_kernel", backend="compile")
    assert done.returncode == 1, done.stderr
    refused, explained, compiled = (
        line for line in done.stdout.splitlines() if line.startswith(("decode", "    NCC", "write"))
    )
    assert refused.startswith("decode 2x128, 8x128: REFUSED: compiling")
    assert explained.startswith("    NCC_IBIR092: rule loop_psum: a device loop whose body writes")
    assert compiled.startswith("write 128, 8x128: compiled in")
    (neff,) = calls.glob("*/neff/kernel.neff")
    assert neff.parts[-3].startswith("write")


def test_the_compile_gate_says_what_is_missing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "segattn", "bench", "kernels", "--backend", "compile"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    (line,) = done.stderr.strip().splitlines()
    assert "AWS's nki is not installed" in line


def test_an_experiment_that_fails_leaves_the_others_in_the_file(tmp_path: Path) -> None:
    out = tmp_path / "micro.json"
    fault = "compile gather_transpose_kernel"
    done, _ = _bench(tmp_path, "microbenchmarks", "--out", str(out), fault=fault)
    assert done.returncode == 1, done.stderr
    results = json.loads(out.read_text())
    assert set(results["failed"]) == {"gather_transpose"}
    assert set(results["ns_per_repetition"]) == {"evict"}
    assert set(results["constants"]) == {"vector_overhead_cycles"}


def test_errors_are_relative_and_nan_must_agree() -> None:
    expected = np.array([3.0, 4.0, np.nan])
    assert relative_error(np.array([3.0, 4.5, np.nan]), expected) == pytest.approx(0.1)
    assert relative_error(np.array([3.0, 4.0, 0.0]), expected) == float("inf")


def test_the_timing_script_needs_nothing_of_the_package() -> None:
    code = f"import runpy; runpy.run_path({nrtpy_timing.__file__!r}, run_name='script')"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-I", "-c", code + "; import sys; print('segattn' in sys.modules)"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False"
