"""The @nki.jit kernel itself, as one calls it on a device or from another NKI kernel.

The host function checks arguments and prepares them; a raw kernel takes the prepared ones: numbers
that change from call to call are int32 tensors in HBM, the others are compiled in.
"""

import numpy as np

from segattn.kernels.device.padded_prefill_nki import padded_prefill_kernel
from segattn.kernels.plan.cache_writes import row_writes
from segattn.kernels.sizes import ScoreNumbers, SoftmaxArguments
from segattn.reference import attention as reference
from segattn.reference import nki

rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((heads, 256, 64)).astype(np.float32) for heads in (4, 2, 2))
k_cache, v_cache = np.zeros((2, 8, 2, 32, 64), np.float32)
slot_mapping = np.where(np.arange(256) < 200, np.arange(256), -1).astype(np.int32)
num_tokens = np.array([[200]], np.int32)

writes = row_writes(slot_mapping, num_kv_heads=2, block_size=32, run=16)

kernel = padded_prefill_kernel[2]  # on two physical cores (LNC2)
with nki.strict(field="error"):  # it keeps every rule of docs/field_rules.md
    out, k_cache, v_cache, _ = kernel(
        q, k, v, k_cache, v_cache, writes.indices, writes.run, num_tokens,
        SoftmaxArguments(ScoreNumbers(scale=64**-0.5), window=None, mode="exact"),
    )  # fmt: skip

nothing = np.zeros((0, 2, 32, 64)), np.zeros((0, 2, 32, 64)), np.zeros(0, np.int32)
expected = reference.segmented_attention(q, k, v, *nothing, 0, 200)
error = float(np.abs(out - expected).max())
print(f"200 tokens in 256 rows on two cores, largest error against float64: {error:.1e}")
