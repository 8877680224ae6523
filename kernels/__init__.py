"""Attention kernels for Trainium2, hand-written in NKI, and their host-level functions.

Each function is two in sequence: `prepare_...` checks the arguments and returns a `Launch` (kernel,
grid, arrays), `run` launches it.

Arrays are NumPy, torch (CPU) or JAX, all of one kind, and so are the results. Shapes, meanings and
the formulas are those of `segattn.reference.attention`, which defines the behaviour; what a kernel
supports beyond that stands at the top of its file. Every rejected argument is a ValueError that
names it; nothing has been written then. Attention comes back in the dtype of q. NumPy and torch
caches are updated in place and returned as the same objects; JAX caches come back as new arrays.

Options that all attention functions share (`AttentionOptions`), given as keywords: `causal`, False
is that a query sees all keys of prior and chunk, without a window; `scale` of the scores, 1e-12 to
1e6, None is 1 / sqrt(head_dim); `softcap` c, 0.01 to 1000, scores are c * tanh(scores / c), 0 is no
cap; `sliding_window` W >= 1, a token sees itself and the W - 1 before it; `sinks` [H] fp32;
`k_scale` and `v_scale`, numbers or [KV], stored value times scale is the real one, needed with fp8,
int8; `k_pre_transposed`, the K cache is [num_blocks, KV, d, block_size]; `lnc`, 1 or 2;
`return_lse`, the result is followed by the natural logarithm of each row's softmax sum, fp32, -inf
where a row is not real or sees no key:
`merge_attention` puts parts together with it; `softmax`:

    exact     the maximum of every row, online
    bounded   one shift for many rows, verified; FloatingPointError where the check fails. Prefill
              in bf16 or fp32
    auto      bounded where it is faster (bf16, tables of 512 tokens or more), with the exact
              softmax where the check fails; exact elsewhere
"""

from .fp8 import fp8_for_device
from .launch import Launch, run
from .launch_decode import DecodePlan, paged_decode, prepare_paged_decode
from .launch_merge import merge_attention, prepare_merge_attention
from .launch_prefill import (
    padded_prefill,
    prepare_padded_prefill,
    prepare_segmented_attention,
    segmented_attention,
)
from .launch_write import prepare_write_kv_cache, write_kv_cache
from .options import AttentionOptions, DecodeOptions, PlanOptions, SegmentedOptions
from .varlen import varlen_attention

__all__ = [
    "AttentionOptions", "DecodeOptions", "DecodePlan", "Launch", "PlanOptions", "SegmentedOptions",
    "fp8_for_device", "merge_attention", "padded_prefill", "paged_decode",
    "prepare_merge_attention", "prepare_padded_prefill", "prepare_paged_decode",
    "prepare_segmented_attention", "prepare_write_kv_cache", "run", "segmented_attention",
    "varlen_attention", "write_kv_cache",
]  # fmt: skip
