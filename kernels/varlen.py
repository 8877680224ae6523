"""Prefill of several prompts in one call, their rows one after the other as in FlashAttention.

Each prompt is a chunk of its own with a prior and a table of its own: one launch for each, of as
many rows as it has tokens, rounded up to 128. Programs are compiled for these row counts. A
prompt's rows are, to the bit, those of `segmented_attention` of that prompt alone. The cache write
needs nothing more: `write_kv_cache` takes the rows of all prompts with their slots.
"""

from itertools import pairwise
from typing import Any, Unpack

import numpy as np

from .addresses import used_blocks
from .arrays import Array, array_kind
from .launch_prefill import segmented_attention
from .options import SEGMENTED, SegmentedOptions, with_defaults
from .validation import check_count, check_integers, check_shape


@with_defaults(SEGMENTED)
def varlen_attention(
    q: Any,
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    block_tables: Any,
    prior_tokens: Any,
    cu_seqlens: Any,
    **options: Unpack[SegmentedOptions],
) -> Any:
    """Attention of the chunks of P prompts, each over its own cached tokens and itself.

    q [H, N, d]; k [KV, N, d], v [KV, N, dv]; caches as of `segmented_attention`;
    block_tables [P, W] and prior_tokens [P] int32; cu_seqlens [P + 1] int32, from 0, ascending, at
    most N: prompt p has the rows cu_seqlens[p] .. cu_seqlens[p + 1] - 1, which stand
    behind its prior_tokens[p] cached ones.
    Options as of `segmented_attention`. Gives out [H, N, dv], with return_lse (out, lse [H, N]);
    rows from cu_seqlens[P] on are zero (lse -inf) and never read. ValueError as there, before the
    first launch where a count or a table is wrong; FloatingPointError with softmax="bounded".
    """
    kind = array_kind(
        q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache, block_tables=block_tables,
        prior_tokens=prior_tokens, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    q_, k_, v_, tables, priors, ends = map(
        kind.read, (q, k, v, block_tables, prior_tokens, cu_seqlens)
    )
    keys, values = kind.view(k_cache), kind.view(v_cache)
    check_shape("q", q_, (None, None, None), "H, N, d")
    check_shape("k", k_, (None, *q_.shape[1:]))
    check_shape("v", v_, (*k_.shape[:2], None))
    check_shape("v_cache", values, (None, None, None, None))
    tables = check_integers("block_tables", tables, (None, None))
    priors = check_integers("prior_tokens", priors, (len(tables),))
    ends = check_integers("cu_seqlens", ends, (len(tables) + 1,))
    _check_ends(ends, q_.shape[1])
    for prompt, prior in enumerate(priors):
        check_count(f"prior_tokens[{prompt}]", prior, tables.shape[1] * values.shape[2])
    used_blocks("block_tables", tables, priors, values, 1)
    out = np.zeros((*q_.shape[:2], v_.shape[2]), q_.dtype)
    lse = np.full(q_.shape[:2], -np.inf, np.float32)
    asked: Any = {**options, "return_lse": True}
    for prompt, (begin, end) in enumerate(pairwise(ends.tolist())):
        rows = slice(begin, end)
        if begin < end:
            out[:, rows], lse[:, rows] = segmented_attention(
                q_[:, rows], k_[:, rows], v_[:, rows], keys, values, tables[prompt],
                int(priors[prompt]), end - begin, **asked,
            )  # fmt: skip
    given = kind.give(out)
    return (given, kind.give(lse)) if options["return_lse"] else given


def _check_ends(ends: Array, num_rows: int) -> None:
    """Begins at 0, ascends, and stays within the rows."""
    steps = np.diff(ends, prepend=0)
    bad = np.flatnonzero((steps < 0) | (ends > num_rows))
    if ends[0] or bad.size:
        where = 0 if ends[0] else int(bad[0])
        raise ValueError(
            f"cu_seqlens[{where}]={ends[where]}: must begin with 0, ascend and be at most "
            f"{num_rows}, the rows of q"
        )
