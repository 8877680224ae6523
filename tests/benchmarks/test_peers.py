"""The peers benchmark on a small checkout laid out as nki-library is."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from segattn.reference import nki
from segattn.tests.checks.peers.cases import Peer
from segattn.tests.checks.peers.modules import numpy_dtype
from segattn.tests.checks.peers.pytest_runs import PeerPlugin
from segattn.tests.checks.peers.results import (
    Comparison,
    PeerMismatchError,
    compare,
    run_kernel,
)

nl, nisa = nki.language, nki.isa

FILES: Mapping[str, str] = {
    "test/__init__.py": "",
    "test/pytest.ini": "[pytest]\n",
    "test/utils/__init__.py": "",
    "test/utils/test_orchestrator.py": "import a_client_of_the_device_farm",
    "test/utils/metrics_collector.py": "import boto3",
    "test/utils/common_dataclasses.py": """
        from enum import Enum

        class Platforms(Enum):
            TRN2 = "trn2"
            TRN3 = "trn3"
    """,
    "test/utils/unit_test_framework.py": """
        class UnitTestFramework:
            def __init__(self):
                self.kernel_input_generator = None
    """,
    "src/lib/__init__.py": "",
    "src/lib/broken.py": "def f(:\n",
    "src/lib/double.py": """
        import nki
        import nki.isa as nisa
        import nki.language as nl

        @nki.jit
        def double(x, factor):
            tile = nl.load(x)
            nisa.tensor_scalar(tile, tile, nl.multiply, factor)
            out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
            nl.store(out, tile)
            return out
    """,
    "test/test_double.py": """
        from types import SimpleNamespace
        from test.utils.common_dataclasses import Platforms
        from test.utils.test_orchestrator import Orchestrator

        import numpy as np
        import pytest
        from lib.double import double

        @pytest.mark.parametrize("factor", [2.0, 3.0])
        @pytest.mark.parametrize("platform", ["TRN2", "TRN3"])
        def test_double(test_manager: Orchestrator, factor, platform):
            x = np.arange(8, dtype=np.float32).reshape(2, 4)
            test_manager.execute(SimpleNamespace(
                kernel_func=double,
                kernel_input={"x.must_alias_input": x, "factor": factor},
                compiler_input=SimpleNamespace(
                    platform_target=Platforms[platform], logical_nc_config=1
                ),
                validation_args=SimpleNamespace(
                    golden_output={"out": 2 * x}, relative_accuracy=1e-3, absolute_accuracy=0.0
                ),
            ))
    """,
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("library")
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(textwrap.dedent(text))
    return root


def _peers(checkout: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "segattn.tests.checks.peers", "--nki-library", str(checkout)]
    return subprocess.run(
        [*command, *options], capture_output=True, text=True, check=False, env=dict(os.environ)
    )


def test_tests_of_a_checkout_run_unmodified_and_one_line_each_tells_how(checkout: Path) -> None:
    done = _peers(checkout, "--tests", "test/test_double.py")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("not Python, not run: src/lib/broken.py: line 1")
    passed, failed, *_ = (line for line in lines if "TRN2" in line)
    assert passed.split()[:3] == ["double", "test_double[TRN2-2.0]", "0.00e+00"]
    assert failed.split()[:3] == ["double", "test_double[TRN2-3.0]", "failed"]
    assert "largest difference 7 of 14, allowed 0.014; 7 of 8 elements" in failed
    assert [line.split()[2] for line in lines if "TRN3" in line] == ["skipped", "skipped"]
    assert lines[-1] == "1 failed, 1 passed, 2 skipped"
    assert done.returncode == 1


def test_the_exit_status_is_0_when_the_chosen_cases_pass(checkout: Path) -> None:
    done = _peers(checkout, "--tests", "test/test_double.py", "--match", "TRN2-2.0")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "1 passed")


def test_nothing_chosen_is_a_failure(checkout: Path) -> None:
    done = _peers(checkout, "--tests", "test/test_double.py", "--match", "no such case")
    assert (done.returncode, "no case ran" in done.stdout) == (1, True)


@pytest.mark.parametrize(
    ("actual", "passes", "error"),
    [
        ([1.0, -100.0], True, 0.0),
        # allowed: 0.5 + 0.01 * 100
        ([2.5, -100.0], True, 0.015),
        ([2.6, -100.0], False, 0.016),
        ([np.nan, -100.0], False, np.nan),
    ],
)
def test_results_are_compared_by_the_largest_reference_value(
    actual: list[float], passes: bool, error: float
) -> None:
    comparison = Comparison()
    expected = np.array([1.0, -100.0], np.float32)
    try:
        compare("out", np.array(actual, np.float32), expected, 0.01, 0.5, comparison)
    except PeerMismatchError:
        assert not passes
    else:
        assert passes
        np.testing.assert_allclose(comparison.error, error, rtol=1e-3, atol=1e-9)


def test_a_race_is_noted_and_the_kernel_runs_on() -> None:
    @nki.jit
    def kernel(x: Any) -> Any:
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        tile = nl.ndarray(x.shape, dtype=x.dtype)
        nisa.memset(tile, nl.program_id(0) + 1.0)
        nl.store(out, tile)
        return out

    comparison = Comparison()
    run_kernel(kernel, [[np.zeros((2, 2), np.float32)]], 2, comparison)
    assert "core 1 writes bytes" in comparison.refused["core_race"]
    assert list(comparison.refused) == ["core_race"]


def test_a_read_of_unwritten_elements_is_noted_and_they_are_nan() -> None:
    @nki.jit
    def kernel(x: Any) -> Any:
        tile = nl.ndarray((2, 4), dtype=x.dtype)
        nisa.dma_copy(tile[:, 0:2], x)
        nisa.tensor_scalar(tile, tile, nl.add, 1.0)
        out = nl.ndarray((2, 4), dtype=x.dtype, buffer=nl.shared_hbm)
        nl.store(out, tile)
        return out

    comparison = Comparison()
    ((found,),) = run_kernel(kernel, [[np.zeros((2, 2), np.float32)]], 1, comparison)
    assert "4 of 8 elements that nothing has written" in comparison.refused["uninitialized_read"]
    np.testing.assert_array_equal(found, [[1, 1, np.nan, np.nan]] * 2)


def test_a_name_that_0_7_removed_is_noted_and_the_kernel_runs_with_it() -> None:
    names: Any = nl

    @nki.jit
    def kernel(x: Any) -> Any:
        tile = nl.load(x)
        for _ in names.dynamic_range(1, nisa.register_alloc(7), 2):
            nisa.tensor_scalar(tile, tile, nl.add, 1.0)
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(out, tile)
        return out

    comparison = Comparison()
    ((found,),) = run_kernel(kernel, [[np.zeros((2, 2), np.float32)]], 1, comparison)
    np.testing.assert_array_equal(found, np.full((2, 2), 3))
    assert list(comparison.refused) == ["removed in 0.7"]
    assert not hasattr(nl, "dynamic_range")


def test_a_peer_selects_tests_by_name_and_parameters() -> None:
    peer = Peer("rope", "test_rope.py", ("fast<64-1", "hf"))
    assert peer.selects("test_rope_fast[64-1-16]")
    assert peer.selects("test_hf[1]")
    assert not peer.selects("test_rope_fast[128-1-16]")
    assert peer.may_select("test_rope_fast")
    assert not peer.may_select("test_rope_sweep")


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("bfloat16", ml_dtypes.bfloat16),
        ("nki.language.float8_e4m3", ml_dtypes.float8_e4m3),
        (np.float16, np.float16),
        (np.dtype("int8"), np.int8),
        (ml_dtypes.float8_e5m2, ml_dtypes.float8_e5m2),
    ],
)
def test_dtypes_of_nki_and_numpy_become_numpy_dtypes(dtype: Any, expected: Any) -> None:
    assert numpy_dtype(dtype) == np.dtype(expected)


def test_sizes_of_the_table_take_the_place_of_the_tests_own() -> None:
    @dataclass(frozen=True)
    class Config:
        hidden: int
        name: str

    own = {
        "tokens": 4096,
        "dtype": "bf16",
        "config": Config(8192, "a"),
        "range_test_options": SimpleNamespace(tensors={"dims": {"hidden": 8192, "lnc": 2}}),
    }
    item = SimpleNamespace(name="test_x[4096]", callspec=SimpleNamespace(params=own))
    plugin = PeerPlugin(Peer("x", "x.py", sizes={"hidden": 512, "tokens": 64}), print)
    plugin._resize(item)  # type: ignore[arg-type]  # all that it looks at
    assert (own["tokens"], own["dtype"], own["config"]) == (64, "bf16", Config(512, "a"))
    assert item.callspec.params["range_test_options"].tensors["dims"] == {"hidden": 512, "lnc": 2}
    assert item.name == "test_x[4096] with tokens=64, hidden=512, hidden=512"
