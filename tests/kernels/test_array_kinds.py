"""torch and JAX arrays in, the same kind out; NumPy says what the values are."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from segattn.kernels import padded_prefill, paged_decode, write_kv_cache
from segattn.reference.attention import Array

BF16 = ml_dtypes.bfloat16


def call(dtype: Any) -> dict[str, Any]:
    """Arrays of a prefill with 5 tokens; the caches are zero."""
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        name: rng.standard_normal((heads, 128, 64)).astype(dtype)
        for name, heads in (("q", 2), ("k", 1), ("v", 1))
    }
    arrays.update({name: np.zeros((2, 1, 16, 64), dtype) for name in ("k_cache", "v_cache")})
    slots = np.full(128, -1, np.int32)
    slots[:5] = np.arange(3, 8)
    return {**arrays, "slot_mapping": slots}


def test_arrays_of_two_kinds_are_refused_by_name() -> None:
    arrays = call(np.float32)
    arrays["v"] = arrays["v"].tolist()
    with pytest.raises(ValueError, match="v: list must be a NumPy, torch or JAX array"):
        padded_prefill(**arrays, num_tokens=5)


@pytest.mark.parametrize("scale", [2, 2.0, np.float32(2), np.array(2, np.float32), [2.0]])
def test_a_scale_may_be_any_number_or_one_per_kv_head(scale: Any) -> None:
    arrays = call(np.float32)
    del arrays["q"]
    arrays["k"][:, :5] = 8.0
    k_cache, _ = write_kv_cache(**arrays, k_scale=scale)
    assert (k_cache[0, 0, 3:8] == 4.0).all()


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_torch_tensors_are_taken_and_caches_change_in_place(dtype: Any) -> None:
    torch = pytest.importorskip("torch", reason="the torch extra is not installed")

    def tensor(array: Array) -> Any:
        if array.dtype == BF16:
            return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
        return torch.from_numpy(array.copy())

    def values(result: Any) -> Array:
        return np.asarray(result.to(torch.float32).numpy())

    expected_arrays = call(dtype)
    expected, _, _ = padded_prefill(**expected_arrays, num_tokens=5)
    tensors = {name: tensor(array) for name, array in call(dtype).items()}
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


def test_jax_arrays_are_taken_and_new_caches_come_back() -> None:
    jax = pytest.importorskip("jax", reason="the jax extra is not installed")
    expected_arrays = call(BF16)
    before = {name: jax.numpy.asarray(array) for name, array in call(BF16).items()}
    slots, k, v = before["slot_mapping"], before["k"], before["v"]
    k_cache, v_cache = write_kv_cache(k, v, before["k_cache"], before["v_cache"], slots)
    write_kv_cache(**{name: expected_arrays[name] for name in expected_arrays if name != "q"})
    np.testing.assert_array_equal(np.asarray(k_cache), expected_arrays["k_cache"])
    assert not np.asarray(before["k_cache"]).any()
    tables, lengths = np.array([[0]], np.int32), np.array([8], np.int32)
    query = expected_arrays["q"][None, :, :1]
    expected = paged_decode(
        query, expected_arrays["k_cache"], expected_arrays["v_cache"], tables, lengths
    )
    out = paged_decode(
        jax.numpy.asarray(query), k_cache, v_cache, jax.numpy.asarray(tables),
        jax.numpy.asarray(lengths),
    )  # fmt: skip
    assert isinstance(out, jax.Array)
    np.testing.assert_array_equal(np.asarray(out), expected)
