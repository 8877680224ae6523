"""A share of the work with the bounded softmax: its chunk, its prior, its result and its flag."""

from typing import Any

from .backend import nisa, nl
from .bounded import BoundedRows
from .bounded_result import BoundedResult
from .chunk_stream import ChunkStream
from .exact_rows import ExactRows
from .prior_stream import MANY_BLOCKS, PriorStream
from .share_padding import Condition
from .shift_estimate import estimate_shift
from .tile_schedule import PARTITIONS, Share


def attend_first_blocks(
    rows: Any,  # BoundedRows or ExactRows
    chunk: ChunkStream,
    num_blocks: int,
    prior: PriorStream | None,  # whose first segments are prepared beside
    result: BoundedResult | None,  # that stores blocks beside later ones, without a prior
    beside: list[Any],  # other work, with steps; not finished here
) -> None:
    """The first blocks of a share over the chunk; query columns of all blocks."""
    ones = nl.ndarray((1, PARTITIONS), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)
    # ACT loads the table of exp while it waits.
    number = nl.ndarray((1, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=number, value=0.0, engine=nisa.engine.gpsimd)
    nisa.activation(dst=number, op=nl.exp, data=number)
    if prior is not None:
        prior.fetch_first()
    chunk.finish_sample()
    if rows.needs_mask:
        rows.write_constants()
    else:
        first = rows.row_tile(0) * PARTITIONS
        estimate_shift(rows, chunk.chunk.keys[:, first : first + PARTITIONS], ones)
    others: list[Any] = []
    if prior is not None:
        prior.fetch_others()
        for segment in prior.first_segments:
            others.append(segment)
    for work in beside:
        work.prepare()
    chunk.load_rest()
    # With many blocks what they need comes first: DVE has time for the prior later.
    rows.beside = [[chunk]]
    later: list[Any] = []
    for work in others:
        if rows.num_blocks > MANY_BLOCKS:
            rows.beside[0].append(work)
        else:
            later.append([work])
    if result is not None:
        rows.result = result
        rows.beside[0].append(result)
        others.append(result)
    for work in beside:
        rows.beside.append([work])
    for block in range(num_blocks):
        chunk.finish_upto(block)
        # The gathers are on their way: PE must not wait for them in its first steps.
        if block == min(1, num_blocks - 1):
            for queue in later:
                rows.beside.append(queue)
        rows.attend_chunk(chunk.chunk.keys, chunk.chunk.values, block, False)
    rows.clear_from(num_blocks)
    rows.drain()
    chunk.finish_upto(rows.num_blocks - 1)
    for work in others:
        work.finish()


def attend_last_blocks(
    rows: Any,  # BoundedRows or ExactRows
    chunk: ChunkStream,
    num_first: int,
    result: BoundedResult,
) -> None:
    """The other blocks over the chunk, after the prior; earlier results are stored beside."""
    if num_first > 0:
        result.add_block(num_first - 1)
    rows.result = result
    rows.beside = [[result]]
    for block in range(num_first, rows.num_blocks):
        rows.attend_chunk(chunk.chunk.keys, chunk.chunk.values, block, True)
    rows.drain()
    result.finish()


def blocks_before_prior(rows: BoundedRows | ExactRows) -> int:
    """Blocks that are computed over the chunk before the prior.

    The others, the last ones, are left for the end: as many as it takes to hide the normalisation
    of all tiles on DVE (some 0.3 us each) behind exp on ACT (some 0.43 us per key tile), as long as
    those before have a key tile for each row tile, whose preparation they hide.
    """
    before = 0
    for block in range(rows.num_blocks):
        before = before + rows.num_keys(block)
    block = rows.num_blocks
    hidden = 0
    while block > 1 and 10 * hidden < 7 * rows.num_tiles:
        keys = rows.num_keys(block - 1)
        if before - keys < rows.num_tiles:
            break
        block = block - 1
        before = before - keys
        hidden = hidden + keys
    return block


def share_valid(
    valid: nl.NkiTensor,  # [128, row tiles of the share] uint8, from valid_rows
    share: Share,
    every: nl.NkiTensor,  # [128, tiles] uint8, result
) -> None:
    """Real rows of a share, tile i * num_heads + h."""
    tiles = len(share.row_tiles)
    nisa.tensor_copy(
        dst=every, src=valid.ap([[tiles, PARTITIONS], [1, tiles], [0, share.num_heads]])
    )


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


def scale_values_bounded(rows: BoundedRows | ExactRows, factor: nl.NkiTensor) -> None:
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


def write_flag(
    result: BoundedResult,
    rows: BoundedRows,
    flags: nl.NkiTensor,  # [1, H] int32, that of the share's first head is raised
    share: Share,
    condition: Condition,  # whether the share was computed
) -> nl.NkiTensor:
    """[1, 1] int32: whether a share failed its check."""
    own = flags[:, share.first_head : share.first_head + 1]
    flag = own
    if share.may_be_padding:
        flag = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.memset(dst=flag, value=0, engine=nisa.engine.gpsimd)

    def write(i: nisa.VirtualRegister | int) -> None:
        result.write_flag(rows, flag)

    condition.run(write)
    if share.may_be_padding:
        nisa.tensor_tensor(dst=own, data1=own, data2=flag, op=nl.maximum)
    return flag


def store_flags(flags: nl.NkiTensor, core: int, num_cores: int) -> nl.NkiTensor:
    """The flags of all cores, [cores, H] int32 HBM."""
    stored = nl.ndarray((num_cores, flags.shape[1]), dtype=nl.int32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=stored[core : core + 1, :], src=flags)
    return stored
