"""`segattn bench` and `segattn trace` from the command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from segattn.cli import main

KERNEL = """
import numpy as np
import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit
def double(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    rows = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=rows, src=x)
    nisa.tensor_scalar(dst=rows, data=rows, op0=nl.multiply, operand0=2.0)
    nisa.dma_copy(dst=out, src=rows)
    return out


assert (double(np.ones((128, 64), np.float32)) == 2).all()
"""


def trace(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "segattn", "trace"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("module", ["json.absent", "json.scanner.absent"])
def test_trace_of_a_module_that_a_package_lacks_is_one_line(module: str) -> None:
    done = trace("-m", module)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: module {module!r} cannot be run: ")


def test_trace_runs_a_script_and_names_bound_and_stalls(tmp_path: Path) -> None:
    script = tmp_path / "double.py"
    script.write_text(KERNEL)
    done = trace("--path", "--perfetto", str(tmp_path / "timelines"), str(script))
    assert done.returncode == 0, done.stderr
    assert "double: modelled" in done.stdout
    assert "bound by" in done.stdout
    assert "Critical path (modelled)" in done.stdout
    (line,) = (n for n, text in enumerate(KERNEL.splitlines(), 1) if "tensor_scalar" in text)
    assert f"double.py:{line}" in done.stdout
    timeline = json.loads((tmp_path / "timelines" / "000_double.json").read_text())
    assert timeline["otherData"]["kernel"] == "double"


def test_trace_finds_the_modules_beside_the_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    (tmp_path / "kernels_beside.py").write_text(KERNEL)
    script.write_text("import kernels_beside\n")
    done = trace(str(script))
    assert done.returncode == 0, done.stderr


def test_trace_refuses_constants_that_are_no_results(tmp_path: Path) -> None:
    script, constants = tmp_path / "double.py", tmp_path / "constants.json"
    script.write_text(KERNEL)
    constants.write_text("{}")
    done = trace("--constants", str(constants), str(script))
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {constants}: no results file")


def test_a_negative_number_of_stalls_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "double.py"
    script.write_text(KERNEL)
    done = trace("--stalls", "-1", str(script))
    assert done.returncode == 2
    assert main(["bench", "kernels", "--stalls", "-1"]) == 2
    for error in (done.stderr, capsys.readouterr().err):
        assert "error: --stalls=-1: must be at least 0" in error


def test_trace_says_so_when_nothing_was_launched(tmp_path: Path) -> None:
    script = tmp_path / "nothing.py"
    script.write_text("x = 1")
    done = trace(str(script))
    assert (done.returncode, "launched no NKI kernel" in done.stderr) == (2, True)
    missing = trace(str(tmp_path / "absent.py"))
    assert (missing.returncode, "is not a file" in missing.stderr) == (2, True)


def test_trace_reports_what_ran_before_the_script_failed(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(KERNEL + "double(np.ones((128, 0), np.float32))\n")
    done = trace(str(script))
    assert done.returncode == 1
    assert "double: modelled" in done.stdout
    assert "has shape (128, 0)" in done.stderr
    script.write_text(KERNEL + KERNEL.replace("nl.multiply", "nl.exp"))
    done = trace(str(script))
    assert done.stdout.count("double: modelled") == 1
    assert "launch 2, double, failed: left out" in done.stderr
