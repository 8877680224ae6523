"""The paged KV cache of every layer, and attention over it through the kernels."""

import math

import numpy as np

from .. import kernels
from .llama import Array, Attention, LlamaConfig
from .padding import DecodeInputs, PrefillInputs


class PagedKVCache:
    """Keys and values of all layers in blocks; block 0 is the scheduler's null block.

    `keys` and `values` are [layers, num_blocks, num_kv_heads, block_size, head_dim] in the
    model's dtype. The kernels write them in place, through slots, and never elsewhere. ValueError
    when memory does not hold them.
    """

    def __init__(
        self, config: LlamaConfig, num_blocks: int, block_size: int, dtype: np.dtype[np.generic]
    ) -> None:
        self.block_size = block_size
        shape = (
            config.num_layers,
            num_blocks,
            config.num_kv_heads,
            block_size,
            config.head_dim,
        )
        try:
            self.keys: Array = np.zeros(shape, dtype)
            self.values: Array = np.zeros(shape, dtype)
        except MemoryError as error:
            size = 2 * math.prod(shape) * dtype.itemsize / 2**30
            raise ValueError(
                f"num_blocks={num_blocks}: a cache of {size:.0f} GiB does not fit in memory"
            ) from error

    def attention(self, inputs: PrefillInputs | DecodeInputs, kv_segment_size: int) -> Attention:
        """Attention of a step that also stores its K and V."""
        if isinstance(inputs, DecodeInputs):
            return self._decode_attention(inputs)
        return self._prefill_attention(inputs, kv_segment_size)

    def _prefill_attention(self, inputs: PrefillInputs, kv_segment_size: int) -> Attention:
        """Attention of one chunk that also stores it: causal over itself and what came before."""

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            k_cache, v_cache = self.keys[layer], self.values[layer]
            out: Array
            if inputs.prior_tokens == 0:
                out, _, _ = kernels.padded_prefill(
                    q, k, v, k_cache, v_cache, inputs.slot_mapping, inputs.num_tokens
                )
                return out
            kernels.write_kv_cache(k, v, k_cache, v_cache, inputs.slot_mapping)
            out = kernels.segmented_attention(
                q, k, v, k_cache, v_cache, inputs.block_table,
                inputs.prior_tokens, inputs.num_tokens, kv_segment_size=kv_segment_size,
            )  # fmt: skip
            return out

        return attend

    def _decode_attention(self, inputs: DecodeInputs) -> Attention:
        """Attention of the new tokens of each request, stored first, over its context."""

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            k_cache, v_cache = self.keys[layer], self.values[layer]
            kernels.write_kv_cache(k, v, k_cache, v_cache, inputs.slot_mapping)
            heads, _, head_dim = q.shape
            queries = q.reshape(heads, inputs.bucket, inputs.num_queries, head_dim)
            out: Array = kernels.paged_decode(
                np.ascontiguousarray(queries.swapaxes(0, 1)),  # [B, Hq, T, d]
                k_cache, v_cache, inputs.block_tables, inputs.context_lens,
                query_lens=inputs.query_lens,
            )  # fmt: skip
            return out.swapaxes(0, 1).reshape(q.shape)

        return attend
