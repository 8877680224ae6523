"""torch tensors in, torch tensors out; NumPy says what the values are."""

from typing import Any

import numpy as np
import pytest
import torch

from segattn.kernels import padded_prefill
from segattn.reference.attention import Array
from segattn.tests.kernels.prefill_call import BF16, prefill_arrays


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_torch_tensors_are_taken_and_caches_change_in_place(dtype: Any) -> None:
    def tensor(array: Array) -> Any:
        if array.dtype == BF16:
            return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
        return torch.from_numpy(array.copy())

    def values(result: Any) -> Array:
        return np.asarray(result.to(torch.float32).numpy())

    expected_arrays = prefill_arrays(dtype)
    expected, _, _ = padded_prefill(**expected_arrays, num_tokens=5)
    tensors = {name: tensor(array) for name, array in prefill_arrays(dtype).items()}
    out, k_cache, v_cache = padded_prefill(**tensors, num_tokens=5)
    assert out.dtype == tensors["q"].dtype
    assert k_cache is tensors["k_cache"]
    assert v_cache is tensors["v_cache"]
    np.testing.assert_array_equal(values(out), expected.astype(np.float32))
    for name in ("k_cache", "v_cache"):
        written = expected_arrays[name].astype(np.float32)
        np.testing.assert_array_equal(values(tensors[name]), written)
    ones = {"k_scale": torch.ones(()), "v_scale": torch.ones(1)}
    again, _, _ = padded_prefill(**tensors, num_tokens=5, **ones)
    np.testing.assert_array_equal(values(again), values(out))
    with pytest.raises(ValueError, match="k: a numpy array, must be torch as q"):
        padded_prefill(**{**tensors, "k": expected_arrays["k"]}, num_tokens=5)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("v_cache", torch.Tensor.to_sparse, "v_cache: .* Sparse"),
        ("k", lambda tensor: tensor.to("meta"), "k: device=meta: torch tensors must be on the CPU"),
        ("q", lambda tensor: tensor.to(torch.float8_e4m3fnuz), "q: .* Float8_e4m3fnuz"),
        ("k_cache", torch._neg_view, "k_cache: .* negative bit"),
    ],
)
def test_a_tensor_that_numpy_cannot_share_is_named(name: str, change: Any, message: str) -> None:
    tensors = {name: torch.from_numpy(array) for name, array in prefill_arrays(np.float32).items()}
    tensors[name] = change(tensors[name])
    with pytest.raises(ValueError, match=message):
        padded_prefill(**tensors, num_tokens=5)


def test_a_tensor_among_numpy_arrays_that_numpy_cannot_share_is_named() -> None:
    scale = torch.ones(1, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"k_scale=.* must be a number"):
        padded_prefill(**prefill_arrays(np.float32), num_tokens=5, k_scale=scale)
