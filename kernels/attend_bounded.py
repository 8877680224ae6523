"""A share of the work with the bounded softmax: its chunk, its prior, its result and its flag."""

from .backend import nisa, nl
from .bounded import BoundedRows, largest_norm, values_with_ones
from .loading import (
    RowTiles,
    each_element,
    load_row_tiles,
    store_row_tiles,
    zero_rows,
)
from .masks import valid_rows
from .paged_cache import PagedSegments, Walk
from .tile_schedule import PARTITIONS, Share


def attend_chunk_bounded(
    rows: BoundedRows,
    q: nl.NkiTensor,  # [H, S, d] HBM
    k: nl.NkiTensor,  # [KV, S, d] HBM
    v: nl.NkiTensor,  # [KV, S, d] HBM
    kv_head: int,
    every_valid: nl.NkiTensor,  # [128, S / 128] uint8: real rows of the chunk
    tile_valid: nl.NkiTensor,  # [128, tiles] uint8: real rows of the share
) -> None:
    """Every block of a share over the chunk, the longest first; the next one is prepared ahead."""
    _, num_rows, d = k.shape
    num_tiles = num_rows // PARTITIONS
    share = rows.share
    every_tile: list[int] = []
    for tile in range(num_tiles):
        every_tile.append(tile)
    k_rows = load_row_tiles(k, kv_head, 1, every_tile)
    q_rows = load_row_tiles(q, share.first_head, share.num_heads, share.row_tiles)
    v_rows = load_row_tiles(v, kv_head, 1, every_tile)
    k_real = zero_rows(k_rows, each_element(every_valid, 1, d), k.dtype)
    keys = nl.ndarray((d, num_rows), dtype=k.dtype, buffer=nl.sbuf)
    rows.transpose(RowTiles(k_real, d, d), 0, num_tiles, keys)
    values = nl.ndarray((PARTITIONS, num_tiles * (d + 1)), dtype=v.dtype, buffer=nl.sbuf)
    values_with_ones(v_rows, every_valid, values)
    longest_key = rows.largest(largest_norm(k_real, every_valid, num_tiles))
    ones = nl.ndarray((1, PARTITIONS), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)
    last = rows.num_blocks - 1
    rows.prepare(last, q_rows, tile_valid, longest_key, ones)
    for i in range(rows.num_blocks):
        block = last - i
        if block > 0:
            rows.prepare(block - 1, q_rows, tile_valid, longest_key, ones)
        rows.attend_chunk(keys, values, block)
    rows.drain()


def attend_prior_bounded(
    rows: BoundedRows,
    prior: PagedSegments,
    walk: Walk,
    end: nisa.VirtualRegister | int,
    kv_head: int,
    exp_scale: float | nl.NkiTensor,
) -> None:
    """Every block of a share over the segments from the walk's start to `end`."""
    d, tokens = prior.d, prior.tokens

    def segment(i: nisa.VirtualRegister) -> None:
        present = prior.present(walk, prior.fetch(0, walk, kv_head))
        k_real = zero_rows(prior.k_stage, prior.each_element(present), prior.dtype)
        values = nl.ndarray((PARTITIONS, tokens * (d + 1)), dtype=prior.dtype, buffer=nl.sbuf)
        values_with_ones(prior.v_stage, present, values)
        keys = nl.ndarray((d, prior.segment_size), dtype=prior.dtype, buffer=nl.sbuf)
        rows.transpose(RowTiles(k_real, d, d), 0, tokens, keys)
        rows.attend_segment(keys, values, tokens, exp_scale)
        prior.advance(walk)

    nl.fori_loop(walk.start, end, segment, step=prior.segment_size)


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


def finish_bounded(
    rows: BoundedRows,
    out: nl.NkiTensor,  # [H, S, d] HBM
    tile_valid: nl.NkiTensor,  # [128, tiles] uint8
    sinks: nl.NkiTensor | None,  # [128, tiles] fp32
    value_scale: float | nl.NkiTensor,
) -> nl.NkiTensor:
    """Normalise, store, and say whether a row failed the check, [1, 1] int32."""
    d, tiles = rows.d, rows.num_tiles
    share = rows.share
    result = nl.ndarray((PARTITIONS, tiles * d), dtype=out.dtype, buffer=nl.sbuf)
    flag = rows.finish(result, tile_valid, sinks, value_scale)
    kept = zero_rows(result, each_element(tile_valid, 1, d), out.dtype)
    store_row_tiles(out, share.first_head, share.num_heads, share.row_tiles, kept)
    return flag


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
