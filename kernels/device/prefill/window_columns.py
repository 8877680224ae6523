"""Keys before a chunk from a pre-transposed cache, whose blocks do not end where the chunk begins.

Blocks [d, block_size] are loaded whole, one DMA each, and lie in token order from the block of a
section's first token on. That token stands prior_tokens % block_size columns inside it, in every
section, since sections are multiples of 128 tokens: DVE reads the key columns from there, at an
address from a register, and replaces those of tokens that no row may see.
"""

from ...backend import nisa, nl
from ...sizes import PARTITIONS
from ..cache.transposed_keys import TransposedKeys


class WindowColumns(nl.NKIObject):
    """Reads key columns of sections of a window, one KV head at a time."""

    def __init__(
        self,
        k_cache: nl.NkiTensor,  # [num_blocks, KV, d, block_size] HBM
        window_blocks: nl.NkiTensor,  # [1, blocks] int32 HBM, see window_plan.window_columns
        window_seen: nl.NkiTensor,  # [1, tokens] uint8 HBM
        prior_tokens: nl.NkiTensor,  # [1, 1] int32 HBM
        section_tokens: int,
        first_head: nl.NkiTensor | None,  # [128, 1] int32: the cache's head that is head 0
    ) -> None:
        self.block_size = k_cache.shape[3]
        self.section_tokens = section_tokens
        self.window_seen = window_seen
        # One block more than the section has: its first token is inside of one.
        self.keys = TransposedKeys(
            k_cache, window_blocks, section_tokens + self.block_size, first_head
        )
        prior = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(dst=prior, src=prior_tokens)
        nisa.tensor_scalar(dst=prior, data=prior, op0=nl.bitwise_and, operand0=self.block_size - 1)
        self.first_column = nisa.register_alloc()
        nisa.register_load(self.first_column, prior)

    def new_seen(self) -> nl.NkiTensor:
        """Unwritten flags of a section's tokens, [128, section] uint8."""
        shape = (PARTITIONS, self.section_tokens)
        return nl.ndarray(shape, dtype=nl.uint8, buffer=nl.sbuf)

    def fetch_blocks(self, first_token: int, blocks: nl.NkiTensor) -> None:
        """Read the blocks of the section that begins at a token."""
        count = blocks.shape[1]
        nisa.dma_copy(
            dst=blocks,
            src=self.keys.block_table.ap(
                [[count, 1], [1, count]], offset=first_token // self.block_size
            ),
        )

    def fetch_seen(self, first_token: int, seen: nl.NkiTensor) -> None:
        """Read which tokens of the section that begins at a token exist."""
        nisa.dma_copy(
            dst=seen,
            src=self.window_seen.ap(
                [[0, PARTITIONS], [1, self.section_tokens]], offset=first_token
            ),
        )

    def write_columns(
        self,
        stage: list[nl.NkiTensor],
        seen: nl.NkiTensor,  # [128, section] uint8, in token order
        first_tile: int,
        num_tiles: int,
        columns: list[nl.NkiTensor],  # [features, section] per part, result
    ) -> None:
        """Key columns of some tiles in the dtype of `columns`, zero where no token exists."""
        begin, end = first_tile * PARTITIONS, (first_tile + num_tiles) * PARTITIONS
        for i in range(len(stage)):
            height, width = stage[i].shape
            part = columns[i]
            nisa.select_reduce(
                dst=part[:, begin:end],
                predicate=seen[0:height, begin:end],
                on_true=stage[i].ap(
                    [[width, height], [1, end - begin]],
                    offset=begin, scalar_offset=self.first_column, indirect_dim=1,
                ),
                on_false=0.0,
            )  # fmt: skip
