"""How the work of prefill is cut into tiles and shared by cores.

A *row tile* is 128 rows of the chunk, a *q_tile* the queries of one head in a row tile. A core's
work is a list of q_groups: some row tiles of consecutive query heads of one KV head. What two cores
are given has the same shape, group by group, so that they run the same instructions and the same
device loops: core 1 has core 0's heads counted from the last one.
"""

import math
from dataclasses import dataclass

from ..sizes import MATMUL_COLUMNS, PARTITIONS

Q_GROUP_BYTES = 128
"""q_tiles of a q_group times element bytes and 128 features: SBUF holds the queries and
accumulators of 8192 rows in bf16 at once, of 4096 in fp32, of half as many with 256 features.
"""

Q_GROUP_ROW_TILES = 32
"""Row tiles of a q_group of one head: its keys and their preparation serve 4096 rows."""

Q_GROUP_HEADS = 8
"""Heads of a q_group that does not hold all rows; with 64 q_tiles in all, 1024 rows at least."""

GROUPS_TOGETHER = 4
"""Most q_groups that share the device loops over the prior: each has staged rows of its own."""

Q_BLOCK_TILES = MATMUL_COLUMNS // PARTITIONS
"""q_tiles of a q_block: its 512 query columns are the moving operand of a matmul."""


def cache_run(block_size: int, tokens_per_partition: int) -> int:
    """Tokens that one gather descriptor moves: a run inside a block and inside a partition."""
    return math.gcd(block_size, tokens_per_partition)


def feature_parts(d: int) -> int:
    """Matmuls of one product over d features: PE contracts over 128."""
    return -(-d // PARTITIONS)


def heads_of_q_group(num_q_heads: int, num_tiles: int, limit: int) -> int:
    """Most heads of a KV head that a q_group of at most `limit` q_tiles takes."""
    heads = max(1, limit // num_tiles, min(Q_GROUP_HEADS, limit // Q_GROUP_HEADS))
    return min(num_q_heads, heads)


@dataclass(frozen=True)
class QGroup:
    """Work of one core on one KV head: the same row tiles of consecutive query heads.

    q_tile t = i * num_heads + h is row tile row_tiles[i] of head first_head + h.
    """

    kv_head: int
    first_head: int
    num_heads: int
    row_tiles: tuple[int, ...]
    first_row_tile: int
    """The smaller one of both cores' first row tiles: rows from there on are computed together."""
    num_stored: int
    """Row tiles whose result is stored: a core without a last one computes another's for show."""

    @property
    def may_be_padding(self) -> bool:
        """Whether other rows of the chunk come before."""
        return self.first_row_tile > 0

    @property
    def num_tiles(self) -> int:
        """q_tiles."""
        return self.num_heads * len(self.row_tiles)

    @property
    def num_blocks(self) -> int:
        """q_blocks."""
        return -(-self.num_tiles // Q_BLOCK_TILES)

    def row_tile(self, t: int) -> int:
        """Row tile of the chunk that q_tile t is."""
        return self.row_tiles[t // self.num_heads]

    def tiles_of(self, block: int) -> int:
        """q_tiles of a q_block."""
        return min(Q_BLOCK_TILES, self.num_tiles - block * Q_BLOCK_TILES)


@dataclass(frozen=True)
class HeadLayout:
    """What the cut depends on."""

    num_q_heads: int
    num_kv_heads: int
    num_row_tiles: int
    limit: int
    """Most q_tiles of a q_group."""

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.num_q_heads // self.num_kv_heads


def head_layout(q_shape: tuple[int, ...], num_kv_heads: int, element_bytes: int) -> HeadLayout:
    """Of queries [H, S, d]."""
    num_q_heads, num_rows, d = q_shape
    limit = Q_GROUP_BYTES // (element_bytes * feature_parts(d))
    return HeadLayout(num_q_heads, num_kv_heads, num_rows // PARTITIONS, limit)


def core_q_groups(layout: HeadLayout, core: int, num_cores: int) -> list[QGroup]:
    """The q_groups of `core`. Two cores take half of the heads each.

    The heads of a KV head are kept together as far as possible, and their rows are cut: first as
    many as fit, then half as many each, so that what lies beyond the real rows can be left out.
    An odd head in the middle is split by row tiles in the order 0 1 1 0, which balances the
    triangle of causal work to one tile.
    """
    num_heads, group = layout.num_q_heads, layout.group
    every_tile = tuple(range(layout.num_row_tiles))
    own = num_heads // num_cores
    groups: list[QGroup] = []
    most = heads_of_q_group(num_heads, layout.num_row_tiles, layout.limit)
    for kv_head in range(layout.num_kv_heads):
        end = min(own, (kv_head + 1) * group)
        for head in range(kv_head * group, end, most):
            heads = min(most, end - head)
            first = head if core == 0 else num_heads - head - heads
            pieces = _cut_rows(layout.num_row_tiles, heads, layout.limit)
            groups += [
                QGroup(first // group, first, heads, every_tile[b:e], b, e - b) for b, e in pieces
            ]
    if num_cores == 2 and num_heads % 2:
        halves = [
            [tile for tile in every_tile if (tile % 4 + 1) // 2 % 2 == half] for half in (0, 1)
        ]
        stored = len(halves[core])
        longest = max(len(half) for half in halves)
        # Both cores compute as many: the last row tile stands in for one that is not there.
        tiles = [(*half, every_tile[-1])[:longest] for half in halves]
        head = num_heads // 2
        for b, e in _cut_rows(longest, 1, layout.limit):
            common = min(half[b] for half in tiles)
            stored_here = min(e, stored) - b
            groups.append(
                QGroup(head // group, head, 1, tiles[core][b:e], common if b else 0, stored_here)
            )
    return groups


def _cut_rows(num_tiles: int, heads: int, limit: int) -> list[tuple[int, int]]:
    """(begin, end) of the row tiles of each q_group of some heads; `limit` q_tiles at most."""
    count = min(Q_GROUP_ROW_TILES, limit // heads)
    if num_tiles * heads <= limit and heads > 1:
        count = num_tiles
    pieces = []
    begin = 0
    while begin < num_tiles:
        end = min(begin + count, num_tiles)
        pieces.append((begin, end))
        if begin == 0 and count * heads > limit // 2:
            count = max(1, count // 2)
        begin = end
    return pieces


def passes_of(groups: list[QGroup], limit: int) -> list[list[QGroup]]:
    """q_groups that are computed together, in order.

    Those with all rows of their heads share one pass as far as SBUF holds them; a q_group that is
    followed by later rows of its heads, or has such rows, is a pass of its own.
    """
    passes: list[list[QGroup]] = []
    for i, group in enumerate(groups):
        is_cut = group.may_be_padding or (i + 1 < len(groups) and groups[i + 1].may_be_padding)
        last = passes[-1] if passes else []
        fits = (
            0 < len(last) < GROUPS_TOGETHER
            and sum(each.num_tiles for each in last) + group.num_tiles <= limit
        )
        if fits and not is_cut and not any(each.may_be_padding for each in last):
            last.append(group)
        else:
            passes.append([group])
    return passes
