"""How a chunk is cut into tiles: sizes with their hardware reason, and small index arithmetic."""

import math

from ..reference.paging import ROW_TILE

PARTITIONS = ROW_TILE
"""Rows of one tile: SBUF and PSUM have 128 partitions."""

PSUM_BANK_BYTES = 2048
"""Bytes of one PSUM bank per partition: 512 fp32 columns, the widest matmul result."""

MATMUL_COLUMNS = 512
"""Moving columns of one matmul: they fill one PSUM bank in fp32."""

MACRO_TILES = 16
"""Key tiles whose scores share one softmax step: 16 * 128 fp32 columns fill four PSUM banks."""


def cache_run(block_size: int, tokens_per_partition: int) -> int:
    """Tokens that one gather descriptor moves: a run inside a block and inside a partition."""
    return math.gcd(block_size, tokens_per_partition)
