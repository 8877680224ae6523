"""JAX arrays in, JAX arrays out; NumPy says what the values are."""

import jax
import numpy as np

from segattn.kernels import paged_decode, write_kv_cache
from segattn.tests.kernels.prefill_call import BF16, prefill_arrays


def test_jax_arrays_are_taken_and_new_caches_come_back() -> None:
    expected_arrays = prefill_arrays(BF16)
    before = {name: jax.numpy.asarray(array) for name, array in prefill_arrays(BF16).items()}
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
