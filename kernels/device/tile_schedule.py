"""How the work is cut into tiles and shared by cores: sizes with their hardware reason, indices."""

import math
from dataclasses import dataclass

from ..backend import nl
from ..sizes import PARTITIONS

SHARE_BYTES = 128
"""Row tiles of a share times element bytes and 128 features: SBUF holds the queries and
accumulators of 8192 rows in bf16 at once, of 4096 in fp32, of half as many with 256 features.
"""

SHARE_ROW_TILES = 32
"""Row tiles of a share of one head: its keys and their preparation serve 4096 rows."""

SHARE_HEADS = 8
"""Heads of a share that does not hold all rows; with 64 tiles in all, 1024 rows at least."""


def cache_run(block_size: int, tokens_per_partition: int) -> int:
    """Tokens that one gather descriptor moves: a run inside a block and inside a partition."""
    return math.gcd(block_size, tokens_per_partition)


@dataclass
class Share(nl.NKIObject):
    """Work of one core on one KV head: the same row tiles of consecutive query heads."""

    first_head: int
    num_heads: int
    row_tiles: list[int]
    may_be_padding: bool  # other rows of the chunk come before


def core_shares(
    num_q_heads: int,
    queries_per_kv_head: int,
    num_tiles: int,
    d: int,
    bytes_per_element: int,
    core: int,
    num_cores: int,
) -> list[Share]:
    """The shares of `core`, SHARE_BYTES at most. Two cores take half of the heads.

    The heads of a KV head are kept together as far as possible, and their rows are cut: first as
    many as fit, then half as many each, so that what lies beyond the real rows can be left out.
    An odd head in the middle is split by row tiles in the order 0 1 1 0, which balances the
    triangle of causal work to one tile.
    """
    every_tile: list[int] = []
    for tile in range(num_tiles):
        every_tile.append(tile)
    limit = SHARE_BYTES // (bytes_per_element * ((d + PARTITIONS - 1) // PARTITIONS))
    shares: list[Share] = []
    first, last = 0, num_q_heads
    if num_cores == 2:
        first = core * ((num_q_heads + 1) // 2)
        last = first + num_q_heads // 2
    for kv_head in range(num_q_heads // queries_per_kv_head):
        begin = max(first, kv_head * queries_per_kv_head)
        end = min(last, (kv_head + 1) * queries_per_kv_head)
        heads = max(1, limit // num_tiles)
        heads = max(heads, min(SHARE_HEADS, limit // SHARE_HEADS))
        for head in range(begin, end, heads):
            add_shares(shares, head, min(heads, end - head), every_tile, limit)
    if num_cores == 2 and num_q_heads % 2 == 1:
        own_tiles: list[int] = []
        for tile in range(num_tiles):
            owner = (tile % 4 + 1) // 2 % 2
            if owner == core:
                own_tiles.append(tile)
        if len(own_tiles) > 0:
            add_shares(shares, num_q_heads // 2, 1, own_tiles, limit)
    return shares


def add_shares(
    shares: list[Share], first_head: int, num_heads: int, row_tiles: list[int], limit: int
) -> None:
    """Add the shares of some heads, cut by rows; `limit` tiles at most."""
    count = min(SHARE_ROW_TILES, limit // num_heads)
    if len(row_tiles) * num_heads <= limit and num_heads > 1:
        count = len(row_tiles)
    begin = 0
    while begin < len(row_tiles):
        end = min(begin + count, len(row_tiles))
        own: list[int] = []
        for i in range(begin, end):
            own.append(row_tiles[i])
        shares.append(Share(first_head, num_heads, own, begin > 0))
        if begin == 0 and count * num_heads > limit // 2:
            count = max(1, count // 2)
        begin = end
