"""A share of the work with the bounded softmax: its chunk, its prior, its result and its flag."""

from typing import Any

from .backend import nisa, nl
from .bounded import BLOCK_TILES, BoundedRows, values_with_ones
from .loading import (
    RowTiles,
    each_element,
    load_row_tiles,
    row_tile_view,
    runs_of,
    zero_rows,
)
from .masks import valid_rows
from .prior_stream import PriorStream
from .shift_estimate import ShiftEstimate, largest_norm_on_scalar
from .tile_schedule import PARTITIONS, Share
from .write_kv_cache_nki import CacheWriter


def attend_chunk_bounded(
    rows: BoundedRows,
    q: nl.NkiTensor,  # [H, S, d] HBM
    k: nl.NkiTensor,  # [KV, S, d] HBM
    v: nl.NkiTensor,  # [KV, S, d] HBM
    kv_head: int,
    every_valid: nl.NkiTensor,  # [128, S / 128] uint8: real rows of the chunk
    tile_valid: nl.NkiTensor,  # [128, tiles] uint8: real rows of the share
    streams: list[PriorStream],  # whose first segments are prepared beside
    writer: CacheWriter | None,  # that stores the chunk beside
) -> None:
    """Every block of a share over the chunk, the longest first."""
    _, num_rows, d = k.shape
    num_tiles = num_rows // PARTITIONS
    share = rows.share
    every_tile: list[int] = []
    for tile in range(num_tiles):
        every_tile.append(tile)
    k_rows = load_row_tiles(k, kv_head, 1, every_tile)
    q_rows = load_queries_backwards(q, share)
    v_rows = load_row_tiles(v, kv_head, 1, every_tile)
    for stream in streams:
        stream.prior.clear_staging()
        stream.fetch_blocks()
    k_real = zero_rows(k_rows, each_element(every_valid, 1, d), k.dtype)
    keys = nl.ndarray((d, num_rows), dtype=k.dtype, buffer=nl.sbuf)
    rows.transpose(RowTiles(k_real, d, d), 0, num_tiles, keys)
    shifts = ShiftEstimate(rows, q_rows, tile_valid)
    values = nl.ndarray((PARTITIONS, num_tiles * (d + 1)), dtype=v.dtype, buffer=nl.sbuf)
    last = rows.num_blocks - 1
    shifts.stage(last, 0)
    longest = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
    largest_norm_on_scalar(k_real, num_tiles, longest)
    shifts.stage(last, 1)
    nisa.tensor_copy(dst=shifts.longest_key, src=rows.largest(longest))
    shifts.stage(last, 2)
    shifts.stage(last, 3)
    values_with_ones(v_rows, every_valid, values, 0, num_tiles)
    for stream in streams:
        stream.fetch_rows()
    others: list[Any] = []
    for stream in streams:
        others.append(stream)
    if writer is not None:
        others.append(writer)
    rows.beside = [[shifts], others]
    for i in range(rows.num_blocks):
        block = last - i
        shifts.finish_block(block)
        rows.attend_chunk(keys, values, block)
    rows.drain()
    for work in others:
        work.finish()


def load_queries_backwards(q: nl.NkiTensor, share: Share) -> nl.NkiTensor:
    """Query rows of a share, [128, (row tile, head, d)], loaded in pieces, the last rows first."""
    d = q.shape[2]
    tiles = len(share.row_tiles)
    width = share.num_heads * d
    rows = nl.ndarray((PARTITIONS, tiles * width), dtype=q.dtype, buffer=nl.sbuf)
    piece = max(1, BLOCK_TILES // share.num_heads)
    num_pieces = (tiles + piece - 1) // piece
    for i in range(num_pieces):
        first = (num_pieces - 1 - i) * piece
        count = min(piece, tiles - first)
        for run in runs_of(share.row_tiles, first, count):
            tile, length = run
            nisa.dma_copy(
                dst=rows[:, tile * width : (tile + length) * width],
                src=row_tile_view(
                    q, share.first_head, share.num_heads, share.row_tiles[tile], length
                ),
            )
    return rows


def share_valid(num_tokens: nl.NkiTensor, share: Share) -> nl.NkiTensor:
    """[128, tiles] uint8: real rows of a share, tile i * num_heads + h."""
    valid = valid_rows(num_tokens, share.row_tiles)
    tiles = len(share.row_tiles)
    every = nl.ndarray((PARTITIONS, tiles * share.num_heads), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_copy(
        dst=every, src=valid.ap([[tiles, PARTITIONS], [1, tiles], [0, share.num_heads]])
    )
    return every


def share_sinks(sinks: nl.NkiTensor | None, share: Share) -> nl.NkiTensor | None:
    """Sinks [128, H] of a share's tiles, [128, tiles] fp32."""
    if sinks is None:
        return None
    tiles = len(share.row_tiles)
    own = nl.ndarray((PARTITIONS, tiles * share.num_heads), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(
        dst=own,
        src=sinks.ap(
            [[sinks.shape[1], PARTITIONS], [0, tiles], [1, share.num_heads]],
            offset=share.first_head,
        ),
    )
    return own


def scale_values_bounded(rows: BoundedRows, factor: nl.NkiTensor) -> None:
    """Divide the value columns of the accumulators by a [128, 1] factor, not the row sums."""
    inverse = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=inverse, data=factor)
    width = rows.d + 1
    own = rows.acc.ap([[rows.num_tiles * width, PARTITIONS], [width, rows.num_tiles], [1, rows.d]])
    nisa.tensor_scalar(dst=own, data=own, op0=nl.multiply, operand0=inverse)


def new_flags(num_q_heads: int) -> nl.NkiTensor:
    """[1, H] int32 SBUF, zero: no share has failed."""
    flags = nl.ndarray((1, num_q_heads), dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=flags, value=0)
    return flags


def set_flag(flags: nl.NkiTensor, share: Share, flag: nl.NkiTensor) -> None:
    """Note a share's flag [1, 1] at its first head."""
    nisa.tensor_copy(dst=flags[:, share.first_head : share.first_head + 1], src=flag)


def store_flags(flags: nl.NkiTensor, core: int, num_cores: int) -> nl.NkiTensor:
    """The flags of all cores, [cores, H] int32 HBM."""
    stored = nl.ndarray((num_cores, flags.shape[1]), dtype=nl.int32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=stored[core : core + 1, :], src=flags)
    return stored
