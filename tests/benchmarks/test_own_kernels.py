"""Kernels of a user's own file: `segattn bench run`, shapes of one's own, the pytest plugin."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from segattn.benchmarks.user_kernel import array_of, load_object, relative_error
from segattn.cli import main
from segattn.reference.nki.install import uninstall
from segattn.tests.benchmarks.fake_neuron import instance

SOURCE = """
import numpy as np
import nki
import nki.isa as nisa
import nki.language as nl
import factors


@nki.jit
def scale(x, factor=factors.TWO):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    rows = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=rows, src=x)
    nisa.tensor_scalar(dst=rows, data=rows, op0=nl.multiply, operand0=factor)
    nisa.dma_copy(dst=out, src=rows)
    return out


@nki.jit
def product(left, right):
    out = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.shared_hbm)
    k, n = nl.load(left), nl.load(right)
    sums = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums, stationary=k, moving=n)
    rows = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=rows, src=sums)
    nisa.dma_copy(dst=out, src=rows)
    return out


def plain(x):
    return x


def make_args():
    return [{"x": np.ones((128, n), np.float32), "factor": 3.0} for n in (64, 512)]


def reference(x, factor=2.0):
    return x * factor


def wrong(x, factor=2.0):
    return x * factor + 1


def broken():
    raise KeyError("no such size")
"""


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    """A user's kernels, with a module beside them; `nki` is gone again after the test."""
    (tmp_path / "factors.py").write_text("TWO = 2.0\n")
    path = tmp_path / "own.py"
    path.write_text(SOURCE)
    yield path
    uninstall()
    sys.modules.pop("factors", None)


def rows(*arguments: str, capsys: pytest.CaptureFixture[str], status: int = 0) -> list[Any]:
    """What `segattn bench run ARGUMENTS --json` prints."""
    assert main(["bench", "run", *arguments, "--json"]) == status
    printed: list[Any] = json.loads(capsys.readouterr().out)
    return printed


def test_a_kernel_of_random_arrays_is_modelled(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = rows(
        *(f"{file}::product", "--shape", "left=64,128:bfloat16", "--shape"),
        "right=64,512:bfloat16",
        capsys=capsys,
    )
    assert row["kernel"] == "product"
    assert row["flops"] == 2 * 64 * 128 * 512
    # Both operands in, the float32 result out.
    assert row["hbm_bytes"] == 2 * 64 * (128 + 512) + 4 * 128 * 512
    # 2 * 64 * 128 * 512 FLOPs at 79.4 to 92 TFLOP/s of bf16 are about 0.1 us of some us.
    assert 0 < row["mfu"] < row["roofline"] < 1
    assert row["needs"]["psum_banks"] == 1
    assert set(row["us"]) == {"best", "base", "field"}


def test_several_kernels_and_arguments_give_one_table(
    file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out, timelines = tmp_path / "rows.json", tmp_path / "t"
    arguments = [f"{file}::scale", f"{file}::scale", "--args", f"{file}::make_args"]
    arguments += ["--check", f"{file}::reference", "--out", str(out), "--perfetto", str(timelines)]
    assert main(["bench", "run", *arguments]) == 0
    printed = capsys.readouterr().out
    assert printed.count("Launches (modelled") == 1
    assert max(map(len, printed.splitlines())) <= 80
    written = json.loads(out.read_text())
    assert [row["arguments"] for row in written] == ["x[128, 64]", "x[128, 512]"] * 2
    assert [row["relative_error"] for row in written] == [0] * 4
    assert len(list(timelines.iterdir())) == 4


def test_a_difference_from_the_reference_is_status_1(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [f"{file}::scale", "--args", f"{file}::make_args", "--check", f"{file}::wrong"]
    first, _ = rows(*arguments, capsys=capsys, status=1)
    assert first["failed"]
    # 3 against 4 everywhere.
    assert first["relative_error"] == pytest.approx(1 / 4)


def test_a_kernel_that_fails_is_told_with_its_line_and_leaves_the_others(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = 1 + SOURCE.splitlines().index(
        "    rows = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)"
    )
    arguments = [f"{file}::scale", f"{file}::plain", "--shape", "x=129,512"]
    failed, plain = rows(*arguments, capsys=capsys, status=1)
    assert failed["error"].startswith(f"own.py:{line}: NkiValidationError: ")
    assert "launched no NKI kernel" in plain["error"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["own.py"], "'own.py': must be FILE.py::name"),
        (["absent.py::scale"], "absent.py is not a file"),
        (["own.py::scal"], "has no 'scal', only scale, product"),
        (["own.py::scale", "--shape", "y=1,2"], "missing a required argument: 'x'"),
        (["own.py::scale", "--shape", "x=1,a"], "--shape x=1,a: must be NAME=SIZE,SIZE:DTYPE"),
        (["own.py::scale", "--shape", "x=1,2:float7"], "float7"),
        (["own.py::scale", "--shape", "x=0,2"], "sizes from 1"),
        (["own.py::scale", "--shape", "x=2,2", "--value", "factor=two"], "--value factor=two"),
        (["own.py::scale", "--args", "own.py::broken"], "own.py:48: KeyError: 'no such size'"),
        (["own.py::scale", "--args", "own.py::plain"], "TypeError"),
        (["bad.py::scale"], "bad.py:2: SyntaxError"),
        (["own.py::scale", "--shape", "x=2,2", "--backend", "device"], "no Neuron device here"),
        (["own.py::scale", "--shape", "x=2,2", "--tolerance", "nan"], "--tolerance=nan"),
    ],
)
def test_wrong_files_and_options_are_one_line(
    file: Path,
    arguments: list[str],
    named: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(file.parent)
    (file.parent / "bad.py").write_text("x = 1\ny = = 2\n")
    assert main(["bench", "run", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert named in captured.err
    assert len(captured.err.splitlines()) == 1


def test_arrays_have_the_shape_and_type_asked_for() -> None:
    name, array = array_of("x=3,5:bfloat16", np.random.default_rng(0))
    assert (name, array.shape, array.dtype) == ("x", (3, 5), ml_dtypes.bfloat16)
    _, indices = array_of("i=64:int32", np.random.default_rng(0))
    assert (indices.min(), indices.max()) == (0, 7)


def test_a_file_is_run_once(tmp_path: Path) -> None:
    path = tmp_path / "once.py"
    path.write_text("def f(): pass\ndef g(): pass\n")
    first = load_object(f"{path}::f")
    path.write_text("raise SystemError")
    assert load_object(f"{path}::g").__module__ == first.__module__


def test_errors_are_relative_and_shapes_must_agree() -> None:
    assert relative_error(np.ones((2, 2)), np.ones(4)) == float("inf")


def test_a_kernel_is_compiled_and_timed_on_a_device(file: Path, tmp_path: Path) -> None:
    environment, python = instance(tmp_path / "instance", "")
    out, calls = tmp_path / "rows.json", tmp_path / "calls"
    command = [sys.executable, "-m", "segattn", "bench", "run", f"{file}::scale", "--args"]
    command += [f"{file}::make_args", "--backend", "device", "--nrtpy-python", str(python)]
    command += ["--calls", str(calls), "--out", str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = json.loads(out.read_text())
    # The made-up instance answers 1, 2, ... 100 us.
    assert (first["measured_p50_us"], first["measured_p99_us"]) == pytest.approx((50.5, 99.01))
    assert second["device_error"] == 0
    assert (calls / "000_scale" / "neff" / "kernel.neff").is_file()


@pytest.mark.filterwarnings("default")  # what our kernels break of the rules is theirs to test
def test_shapes_of_ones_own_replace_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "own.json"
    shape = ["--rows", "128", "--prior", "0,256", "--heads", "2", "--kv-heads", "2"]
    shape += ["--head-dim", "64", "--softmax", "auto", "--dtype", "float32", "--window", "200"]
    assert main(["bench", "kernels", *shape, "--out", str(out)]) == 0
    labels = [row["label"] for row in json.loads(out.read_text())["rows"]]
    suffix = "2x64, window 200, float32, auto"
    assert labels == [f"128/0, {suffix}", f"128/256, {suffix}"]
    assert main(["bench", "kernels", "--batch", "2", "--context", "64", "--dtype", "fp8"]) == 0
    assert "decode 2x64, 4x128, fp8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("--rows", "x", "list of numbers"),
        ("--rows", "0", "--rows: every number must be at least 1"),
        ("--head-dim", "0", "--head-dim=0"),
        ("--softmax", "fast", "'fast'"),
    ],
)
def test_a_shape_that_is_none_is_refused(
    option: str, value: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "kernels", option, value]) == 2
    assert named in capsys.readouterr().err


TESTS = """
import numpy as np
from own import scale


def test_scale(nki_model):
    call = nki_model(scale, x=np.ones((128, COLUMNS), np.float32))
    assert (call.outputs[0] == 2).all()
    assert call.rows[0]["kernel"] == "scale"
    call.assert_no_regression("modelled.json")
"""


def run_pytest(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Pytest of a kernel repository that has the plugin."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "segattn.benchmarks.pytest_plugin"]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        [*command, *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )


def test_the_plugin_gates_the_modelled_time(file: Path) -> None:
    folder = file.parent
    (folder / "pytest.ini").write_text("[pytest]\nnki_interpreter = true\npythonpath = .\n")
    test = folder / "test_own.py"
    test.write_text(TESTS.replace("COLUMNS", "512"))
    missing = run_pytest(folder)
    assert (missing.returncode, "run pytest --nki-update once" in missing.stdout) == (1, True)
    assert run_pytest(folder, "--nki-update").returncode == 0
    stored = json.loads((folder / "modelled.json").read_text())
    assert set(stored["test_scale"]) == {"best", "base", "field"}
    assert run_pytest(folder, "--nki-trace", "timelines").returncode == 0
    (timeline,) = (folder / "timelines").iterdir()
    assert json.loads(timeline.read_text())["otherData"]["kernel"] == "scale"
    test.write_text(TESTS.replace("COLUMNS", "4096"))
    slower = run_pytest(folder)
    assert slower.returncode == 1
    assert "test_scale: modelled" in slower.stdout


def test_a_file_that_exits_when_it_is_run_is_one_line(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("\nraise SystemExit(7)\n")
    assert main(["bench", "run", f"{file}::kernel"]) == 2
    assert capsys.readouterr().err == "error: own.py:2: SystemExit: 7\n"
