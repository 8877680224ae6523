"""A share of the work with the bounded softmax: its chunk, its prior, its result and its flag."""

from typing import Any

from .backend import nisa, nl
from .bounded import BoundedRows
from .bounded_result import BoundedResult
from .chunk_stream import ChunkStream
from .prior_stream import PriorStream
from .shift_estimate import estimate_shift
from .tile_schedule import PARTITIONS, Share
from .write_kv_cache_nki import CacheWriter


def attend_chunk_bounded(
    rows: BoundedRows,
    chunk: ChunkStream,
    tile_valid: nl.NkiTensor,  # [128, tiles] uint8: real rows of the share
    prior: PriorStream | None,  # whose first segments are prepared beside
    writer: CacheWriter | None,  # that stores the chunk beside
    result: BoundedResult | None,  # that stores blocks beside later ones: there is no prior
) -> None:
    """Every block of a share over the chunk."""
    ones = nl.ndarray((1, PARTITIONS), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)
    # ACT loads the table of exp while it waits.
    number = nl.ndarray((1, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=number, value=0.0, engine=nisa.engine.gpsimd)
    nisa.activation(dst=number, op=nl.exp, data=number)
    if prior is not None:
        prior.fetch_first()
    chunk.tile_valid = tile_valid
    chunk.finish_sample()
    first = rows.row_tile(0) * PARTITIONS
    estimate_shift(rows, chunk.keys[:, first : first + PARTITIONS], ones)
    if writer is not None and writer.steps == 0:
        writer.prepare()
    chunk.load_rest()
    others: list[Any] = []
    rows.beside = [[chunk]]
    if prior is not None:
        prior.fetch_others()
        for segment in prior.first_segments:
            others.append(segment)
            rows.beside.append([segment])
    if writer is not None:
        others.append(writer)
        rows.beside.append([writer])
    if result is not None:
        others.append(result)
        rows.beside[0].append(result)
        rows.result = result
    for block in range(rows.num_blocks):
        chunk.finish_upto(block)
        rows.attend_chunk(chunk.keys, chunk.values, block)
    rows.drain()
    for work in others:
        work.finish()


def share_valid(valid: nl.NkiTensor, share: Share) -> nl.NkiTensor:
    """[128, tiles] uint8 from valid_rows: real rows of a share, tile i * num_heads + h."""
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
