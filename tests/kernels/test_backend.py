"""Which nki runs the kernels."""

import sys
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import numpy as np
import pytest

from segattn.kernels import backend, write_kv_cache
from segattn.reference import nki as interpreter
from segattn.tests.kernels.cases import normal


@pytest.fixture
def no_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nki", None)


@pytest.fixture
def sdk(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("nki")
    monkeypatch.setitem(sys.modules, "nki", module)
    return module


def device(monkeypatch: pytest.MonkeyPatch, *, present: bool) -> None:
    monkeypatch.setattr(backend, "neuron_device_present", lambda: present)


def test_auto_without_a_device_is_the_interpreter(
    monkeypatch: pytest.MonkeyPatch, sdk: ModuleType
) -> None:
    device(monkeypatch, present=False)
    assert backend.select("auto") == ("interpreter", interpreter)


def test_auto_with_device_and_sdk_is_the_device(
    monkeypatch: pytest.MonkeyPatch, sdk: ModuleType
) -> None:
    device(monkeypatch, present=True)
    assert backend.select("auto") == ("device", sdk)


@pytest.mark.usefixtures("no_sdk")
def test_auto_with_a_device_but_no_sdk_is_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    device(monkeypatch, present=True)
    assert backend.select("auto") == ("interpreter", interpreter)


def test_the_simulator_needs_no_device(monkeypatch: pytest.MonkeyPatch, sdk: ModuleType) -> None:
    device(monkeypatch, present=False)
    assert backend.select("simulator") == ("simulator", sdk)


@pytest.mark.usefixtures("no_sdk")
@pytest.mark.parametrize("requested", ["device", "simulator"])
def test_a_missing_sdk_is_an_error_with_the_install_line(requested: str) -> None:
    with pytest.raises(ImportError, match=r"pip install .*https://pip\.repos\.neuron\.amazonaws"):
        backend.select(requested)


def test_the_installed_interpreter_is_no_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nki", interpreter)
    assert backend.aws_nki() is None


def test_a_device_that_is_absent_is_an_error(
    monkeypatch: pytest.MonkeyPatch, sdk: ModuleType
) -> None:
    device(monkeypatch, present=False)
    with pytest.raises(RuntimeError, match="no Neuron device"):
        backend.select("device")


def test_an_unknown_backend_is_named_with_the_choices() -> None:
    with pytest.raises(ValueError, match="SEGATTN_BACKEND='gpu': must be one of auto, device"):
        backend.select("gpu")


def test_calls_from_several_threads_are_all_right() -> None:
    rng = np.random.default_rng(0)
    k, v = normal(rng, (2, 1, 40, 32), np.float32)
    slots = np.arange(40, dtype=np.int32)

    def written(_: int) -> bool:
        k_cache, v_cache = np.zeros((2, 3, 1, 16, 32), np.float32)
        write_kv_cache(k, v, k_cache, v_cache, slots)
        rows = [cache.reshape(48, 32)[:40] for cache in (k_cache, v_cache)]
        return bool((rows[0] == k[0]).all() and (rows[1] == v[0]).all())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(written, range(32)))
    finally:
        sys.setswitchinterval(interval)
