"""A runner of one's own: two requests share a paged cache, and every attention is a kernel's.

The model is one attention layer over random weights; the last lines compute the same tokens without
a cache, one request at a time.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from segattn.kernels import padded_prefill, paged_decode, write_kv_cache
from segattn.reference import attention as reference
from segattn.reference.paging import num_blocks_for, slot_of

HEADS, KV_HEADS, D, BLOCK, VOCABULARY, NEW_TOKENS = 4, 2, 32, 16, 50, 8
rng = np.random.default_rng(0)
embedding = rng.standard_normal((VOCABULARY, 64)).astype(np.float32)
w_q, w_k, w_v = (
    rng.standard_normal((64, n * D)).astype(np.float32) / 8 for n in (HEADS, KV_HEADS, KV_HEADS)
)
w_out = rng.standard_normal((HEADS * D, VOCABULARY)).astype(np.float32)
k_cache, v_cache = np.zeros((2, 8, KV_HEADS, BLOCK, D), np.float32)


def project(tokens: list[int], weights: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """[heads, tokens, D]."""
    return np.ascontiguousarray(
        (embedding[tokens] @ weights).reshape(len(tokens), -1, D).swapaxes(0, 1)
    )


def next_token(attention: npt.NDArray[Any]) -> int:
    """The likeliest token after one whose attention is [HEADS, D]."""
    return int(np.argmax(attention.reshape(-1) @ w_out))


prompts = [[3, 14, 15, 9, 26, 5], [27, 18, 28]]
free_blocks = list(range(8))
tables = np.full((2, 2), -1, np.int32)
tokens = [list(prompt) for prompt in prompts]

# Prefill, one request at a time: 128 rows of which the prompt is real.
for request, prompt in enumerate(prompts):
    for block in range(num_blocks_for(len(prompt) + NEW_TOKENS, BLOCK)):
        tables[request, block] = free_blocks.pop()
    padding = [0] * (128 - len(prompt))
    q, k, v = (project(prompt + padding, weights) for weights in (w_q, w_k, w_v))
    slots = np.full(128, -1, np.int32)
    slots[: len(prompt)] = [slot_of(i, tables[request].tolist(), BLOCK) for i in range(len(prompt))]
    out, _, _ = padded_prefill(q, k, v, k_cache, v_cache, slots, len(prompt))
    tokens[request].append(next_token(out[:, len(prompt) - 1]))

# Decode both requests together: store the last token of each, attend over the cache.
for _ in range(NEW_TOKENS - 1):
    last = [each[-1] for each in tokens]
    lengths = np.array([len(each) for each in tokens], np.int32)
    ends = [
        slot_of(len(each) - 1, table.tolist(), BLOCK)
        for each, table in zip(tokens, tables, strict=True)
    ]
    write_kv_cache(
        project(last, w_k), project(last, w_v), k_cache, v_cache, np.array(ends, np.int32)
    )
    queries = np.ascontiguousarray(project(last, w_q).swapaxes(0, 1)[:, :, None])  # [B, H, 1, D]
    out = paged_decode(queries, k_cache, v_cache, tables, lengths)
    for request in range(2):
        tokens[request].append(next_token(out[request, :, 0]))

expected = [list(prompt) for prompt in prompts]
for sequence in expected:
    for _ in range(NEW_TOKENS):
        q, k, v = (project(sequence, weights) for weights in (w_q, w_k, w_v))
        nothing = (
            np.zeros((0, KV_HEADS, BLOCK, D)),
            np.zeros((0, KV_HEADS, BLOCK, D)),
            np.zeros(0, int),
        )
        out = reference.segmented_attention(q, k, v, *nothing, 0, len(sequence))
        sequence.append(next_token(out[:, -1]))
generated = [each[-NEW_TOKENS:] for each in tokens]
print(f"two requests generated {generated}, {'not ' * (tokens != expected)}as without a cache")
