"""The host function that merges attention over disjoint sets of keys."""

from typing import Any

import numpy as np

from .arrays import Array, array_kind, read_optional
from .device.merge_attention_nki import merge_attention_kernel
from .launch import Launch, launched
from .sizes import MATMUL_COLUMNS, PARTITIONS
from .validation import DTYPES, check_choice, check_cores, check_shape, check_sinks

MOST_ROWS = 2**19
"""Rows of all sets, which keeps the program below 60,000 instructions."""


def prepare_merge_attention(
    outs: Any, lses: Any, *, sinks: Any = None, lnc: int = 1
) -> Launch[tuple[Any, Any]]:
    """Attention over the union of N disjoint sets of keys from that over each.

    outs [N, ..., H, S, d] and lses [N, ..., H, S] fp32 as the attention functions return them with
    return_lse: for decode [N, B, H, T, d]. N is 1 to 128, d at most 512. sinks [H] join the sums
    once, so that the parts are attended without them. The launch, or `merge_attention` of the same
    arguments, gives (out [..., H, S, d] in the dtype of outs, lse [..., H, S] fp32), zero and -inf
    for a row that sees nothing in any set.
    """
    kind = array_kind(outs=outs, lses=lses)
    outs_, lses_ = kind.read(outs), kind.read(lses)
    cores = check_cores(lnc)
    if outs_.ndim < 4:
        raise ValueError(f"outs: shape {outs_.shape}, must be [N, ..., H, S, d]")
    num_sets, *rows, d = outs_.shape
    if not 1 <= num_sets <= PARTITIONS:
        raise ValueError(f"outs: {num_sets} sets of keys, must be 1 to {PARTITIONS}")
    if not 1 <= d <= MATMUL_COLUMNS:
        raise ValueError(f"outs: head size {d}, must be 1 to {MATMUL_COLUMNS}")
    if not 1 <= outs_.size // d <= MOST_ROWS:
        raise ValueError(f"outs: {outs_.size // d} rows in all sets, must be 1 to {MOST_ROWS}")
    check_choice("dtype of outs", outs_.dtype, DTYPES)
    check_shape("lses", lses_, (num_sets, *rows))
    if lses_.dtype != np.float32:
        raise ValueError(f"lses: dtype {lses_.dtype}, must be float32")
    factors = check_sinks(read_optional(kind, sinks), rows[-2])
    of_rows = None
    if factors is not None:
        of_rows = np.broadcast_to(factors[0][:, None], rows).reshape(-1, 1).copy()

    def finish(results: tuple[Array, Array]) -> tuple[Any, Any]:
        out, lse = results
        return kind.give(out.reshape(*rows, d)), kind.give(lse.reshape(rows))

    arrays = (outs_.reshape(num_sets, -1, d), lses_.reshape(num_sets, -1), of_rows)
    return Launch(merge_attention_kernel, cores, arrays, finish)


merge_attention = launched(prepare_merge_attention)
"""Attention over the union of sets of keys: `prepare_merge_attention`, run at once."""
