"""Which kinds of arrays and numbers the kernels take."""

from typing import Any

import numpy as np
import pytest

from segattn.kernels import padded_prefill, write_kv_cache
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
