"""Which kinds of arrays and numbers the kernels take."""

import importlib
import sys
from typing import Any

import numpy as np
import pytest

from segattn.kernels import padded_prefill, write_kv_cache
from segattn.reference.extras import MissingExtraError
from segattn.tests.kernels.prefill_call import prefill_arrays


def test_arrays_of_two_kinds_are_refused_by_name() -> None:
    arrays = prefill_arrays(np.float32)
    arrays["v"] = arrays["v"].tolist()
    with pytest.raises(ValueError, match="v: list must be a NumPy, torch or JAX array"):
        padded_prefill(**arrays, num_tokens=5)


@pytest.mark.parametrize("scale", [2, 2.0, np.float32(2), np.array(2, np.float32), [2.0]])
def test_a_scale_may_be_any_number_or_one_per_kv_head(scale: Any) -> None:
    arrays = prefill_arrays(np.float32)
    del arrays["q"]
    arrays["k"][:, :5] = 8.0
    k_cache, _ = write_kv_cache(**arrays, k_scale=scale)
    assert (k_cache[0, 0, 3:8] == 4.0).all()


@pytest.mark.parametrize("count", [np.int32(5), np.array(5), np.array([[5]], np.int32)])
def test_a_length_may_be_an_integer_array_of_one_element(count: Any) -> None:
    expected, _, _ = padded_prefill(**prefill_arrays(np.float32), num_tokens=5)
    out, _, _ = padded_prefill(**prefill_arrays(np.float32), num_tokens=count)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("count", [np.array([5, 5]), np.array([5.0]), "5", None])
def test_any_other_length_is_refused(count: Any) -> None:
    with pytest.raises(ValueError, match=r"num_tokens=.*: must be an integer"):
        padded_prefill(**prefill_arrays(np.float32), num_tokens=count)


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_operators_of_a_missing_library_name_its_extra(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"segattn.kernels.{library}_ops", raising=False)
    with pytest.raises(MissingExtraError, match=rf"'segattn\[{library}\]'"):
        importlib.import_module(f"segattn.kernels.{library}_ops")
