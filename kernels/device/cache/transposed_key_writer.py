"""Storing keys in a K cache that is pre-transposed, [num_blocks, KV, d, block_size].

Blocks that a call fills are transposed by PE, 128 slots at a time, and stored as rows of block_size
elements, all KV heads of a block in one DMA. Single tokens are scattered element by element: d * KV
descriptors of one element each, 128 tokens per trip of a dynamic loop.
"""

from ...backend import nisa, nl
from ...sizes import PARTITIONS
from ..loading import inverse_scales
from .paged_cache import integer_multiple, to_cache_dtype
from .transposed_keys import feature_parts


class TransposedKeyWriter(nl.NKIObject):
    """Stores the keys of a chunk by a plan of key_write_plan.py."""

    def __init__(
        self,
        k: nl.NkiTensor,  # [KV, T, d] HBM
        k_cache: nl.NkiTensor,  # [num_blocks, KV, d, block_size] HBM
        tokens: nl.NkiTensor,  # [tiles, 128] int32 HBM
        blocks: nl.NkiTensor,  # [tiles, 128 / block_size] int32 HBM
        rest: nl.NkiTensor,  # [2, (tiles + 1) * 128] int32 HBM
        num_rest: nl.NkiTensor,  # [1, 1] int32 HBM
        inverse_scale: nl.NkiTensor | None,  # [128, KV] fp32 SBUF
    ) -> None:
        self.k = k
        self.k_cache = k_cache
        self.tokens = tokens
        self.blocks = blocks
        self.rest = rest
        self.num_rest = num_rest
        self.inverse_scale = inverse_scale

    def write(self, core: int = 0, num_cores: int = 1) -> None:
        """Store the whole blocks, then the other tokens: every second tile of 128 on two cores.

        Both cores run the loop equally often; `rest` has a tile more than there are tokens.
        """
        for tile in range(core, self.tokens.shape[0], num_cores):
            self.write_blocks(tile)
        count = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(dst=count, src=self.num_rest)
        end = nisa.register_alloc()
        nisa.register_load(end, count)

        def rest_of_tokens(i: nisa.VirtualRegister) -> None:
            self.write_tokens(i, core * PARTITIONS)

        nl.fori_loop(0, end, rest_of_tokens, step=num_cores * PARTITIONS)

    def gather_rows(self, tokens: nl.NkiTensor) -> nl.NkiTensor:
        """Rows of the tokens [128, 1] int32, all KV heads, [128, KV * d]; zero for -1."""
        num_kv_heads, num_tokens, d = self.k.shape
        rows = nl.ndarray((PARTITIONS, num_kv_heads * d), dtype=self.k.dtype, buffer=nl.sbuf)
        nisa.memset(dst=rows, value=0.0, engine=nisa.engine.gpsimd)
        nisa.dma_copy(
            dst=rows,
            src=self.k.reshape((num_kv_heads * num_tokens, d)).ap(
                [[d, PARTITIONS], [num_tokens * d, num_kv_heads], [1, d]],
                offset=0, vector_offset=tokens, indirect_dim=0,
            ),
            oob_mode=nisa.oob_mode.skip,
        )  # fmt: skip
        return rows

    def stored(self, values: nl.NkiTensor, kv_head: int, result: nl.NkiTensor) -> None:
        """`values` of a head, in SBUF or PSUM, divided by its scale in the cache's dtype."""
        if self.inverse_scale is None:
            nisa.tensor_copy(dst=result, src=values)
            return
        scaled = nl.ndarray(values.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(
            dst=scaled, data=values, op0=nl.multiply,
            operand0=self.inverse_scale[0 : values.shape[0], kv_head : kv_head + 1],
        )  # fmt: skip
        to_cache_dtype(scaled, result)

    def write_blocks(self, tile: int) -> None:
        """Transpose the rows of 128 slots and store them as rows of their blocks."""
        num_kv_heads, _, d = self.k.shape
        block_size = self.k_cache.shape[3]
        runs = PARTITIONS // block_size
        tokens = nl.ndarray((PARTITIONS, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(
            dst=tokens, src=self.tokens.ap([[1, PARTITIONS], [1, 1]], offset=tile * PARTITIONS)
        )
        blocks = nl.ndarray((1, runs), dtype=nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(dst=blocks, src=self.blocks[tile : tile + 1, :])
        rows = self.gather_rows(tokens)
        for part in feature_parts(d):
            first, height = part
            width = num_kv_heads * PARTITIONS
            columns = nl.ndarray((height, width), dtype=self.k_cache.dtype, buffer=nl.sbuf)
            for head in range(num_kv_heads):
                bank = nl.ndarray((height, PARTITIONS), dtype=self.k.dtype, buffer=nl.psum)
                nisa.nc_transpose(
                    dst=bank,
                    data=rows[:, head * d + first : head * d + first + height],
                    engine=nisa.engine.tensor,
                )
                own = columns[:, head * PARTITIONS : (head + 1) * PARTITIONS]
                self.stored(bank, head, own)
            for run in range(runs):
                nisa.dma_copy(
                    dst=self.k_cache.ap(
                        [[block_size, height], [d * block_size, num_kv_heads], [1, block_size]],
                        offset=first * block_size,
                        scalar_offset=blocks[:, run : run + 1],
                        indirect_dim=0,
                    ),
                    src=columns.ap(
                        [[width, height], [PARTITIONS, num_kv_heads], [1, block_size]],
                        offset=run * block_size,
                    ),
                    oob_mode=nisa.oob_mode.skip,
                )

    def write_tokens(self, begin: nisa.VirtualRegister, first: int) -> None:
        """Store up to 128 single tokens, from `first` behind `begin` on, element by element.

        Element of feature 0 of KV head 0: (slot - offset) * KV * d + offset, offset the slot's
        place within its block; it stays negative for slot -1.
        """
        num_kv_heads, _, d = self.k.shape
        num_blocks, _, _, block_size = self.k_cache.shape
        places = self.rest.shape[1]
        planned = nl.ndarray((PARTITIONS, 2), dtype=nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(
            dst=planned,
            src=self.rest.ap(
                [[1, PARTITIONS], [places, 2]], offset=first, scalar_offset=begin, indirect_dim=1
            ),
        )
        tokens, slots = planned[:, 0:1], planned[:, 1:2]
        rows = self.gather_rows(tokens)
        stored = nl.ndarray(rows.shape, dtype=self.k_cache.dtype, buffer=nl.sbuf)
        for head in range(num_kv_heads):
            first, last = head * d, (head + 1) * d
            self.stored(rows[:, first:last], head, stored[:, first:last])
        offset = nl.ndarray((PARTITIONS, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=offset, data=slots, op0=nl.bitwise_and, operand0=block_size - 1)
        start = nl.ndarray((PARTITIONS, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=start, data=slots, op0=nl.bitwise_and, operand0=-block_size)
        elements = integer_multiple(start, num_kv_heads * d)
        nisa.tensor_tensor(dst=elements, data1=elements, data2=offset, op=nl.add)
        flat = self.k_cache.reshape((num_blocks * num_kv_heads * d * block_size, 1))
        nisa.dma_copy(
            dst=flat.ap(
                [[1, PARTITIONS], [d * block_size, num_kv_heads], [block_size, d], [1, 1]],
                offset=0, vector_offset=elements, indirect_dim=0,
            ),
            src=stored,
            oob_mode=nisa.oob_mode.skip,
        )  # fmt: skip


def key_writer(
    k: nl.NkiTensor,  # [KV, T, d] HBM
    k_cache: nl.NkiTensor,  # HBM
    k_scales: nl.NkiTensor | None,  # [1, KV] fp32 HBM
    tokens: nl.NkiTensor | None,
    blocks: nl.NkiTensor | None,
    rest: nl.NkiTensor | None,
    num_rest: nl.NkiTensor | None,
) -> TransposedKeyWriter | None:
    """The writer of a pre-transposed K cache, where there is a plan for one."""
    if tokens is None or blocks is None or rest is None or num_rest is None:
        return None
    inverse = inverse_scales(k_scales)
    return TransposedKeyWriter(k, k_cache, tokens, blocks, rest, num_rest, inverse)
