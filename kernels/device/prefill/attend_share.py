"""A share of the work: its chunk, its prior, its result and its flag."""

from typing import Any

from ...backend import nisa, nl
from ...sizes import PARTITIONS
from ..softmax import ScoreScale
from ..tile_schedule import Share
from .bounded import BoundedRows
from .chunk_stream import ChunkKeys, ChunkStream
from .exact_rows import ExactRows
from .prior_stream import MANY_BLOCKS, PriorStream
from .share_padding import Condition
from .share_result import ShareResult
from .share_tiles import ShareTiles
from .shift_estimate import estimate_shift


def attend_share(
    rows: BoundedRows | ExactRows,
    q: nl.NkiTensor,  # [H, S, d] HBM
    keys: ChunkKeys,
    prior: PriorStream | None,
    own_valid: nl.NkiTensor,  # [128, row tiles of the share] uint8
    value_scale: nl.NkiTensor | None,  # [128, 1] fp32
    sinks: nl.NkiTensor | None,  # [128, tiles] fp32
    prior_scale: ScoreScale,
    condition: Condition,
    out: nl.NkiTensor,  # [H, S, d] HBM, result
    beside: list[Any],  # work that the share's macros leave time for
) -> ShareResult:
    """A share, if the condition holds: first blocks of the chunk, prior, last blocks."""
    tiles = rows.tiles
    tile_valid = nl.ndarray((PARTITIONS, tiles.num_tiles), dtype=nl.uint8, buffer=nl.sbuf)
    chunk = ChunkStream(rows, q, keys, tile_valid)
    if prior is None:
        value_scale = None
    result = ShareResult(rows, out, tile_valid, sinks, value_scale)
    num_first = tiles.num_blocks
    if prior is not None and value_scale is None:
        num_first = blocks_before_prior(tiles)

    def first(i: nisa.VirtualRegister | int) -> None:
        chunk.begin()
        if prior is not None:
            prior.begin()
        share_valid(own_valid, tiles.share, tile_valid)
        attend_first_blocks(rows, chunk, num_first, prior, result, beside)
        if prior is not None:
            if value_scale is not None:
                scale_values(tiles, value_scale)
            prior.attend_window(prior_scale)

    def last(i: nisa.VirtualRegister | int) -> None:
        attend_last_blocks(rows, chunk, num_first, result)

    condition.run(first)
    if prior is not None:
        prior.attend(prior_scale)
        condition.run(last)
    return result


def attend_first_blocks(
    rows: Any,  # BoundedRows or ExactRows
    chunk: ChunkStream,
    num_blocks: int,
    prior: PriorStream | None,  # whose first segments are prepared beside
    result: ShareResult,  # that stores blocks beside later ones, without a prior
    beside: list[Any],  # other work, with steps; not finished here
) -> None:
    """The first blocks of a share over the chunk; query columns of all blocks."""
    ones = nl.ndarray((1, PARTITIONS), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)
    # ACT loads the table of exp while it waits.
    number = nl.ndarray((1, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=number, value=0.0, engine=nisa.engine.gpsimd)
    nisa.activation(dst=number, op=nl.exp, data=number)
    if rows.is_exact:
        rows.write_constants()
    if prior is not None:
        prior.fetch_first()
    chunk.finish_sample()
    if not rows.is_exact:
        estimate_shift(rows, chunk.chunk.keys, rows.tiles.row_tile(0), ones)
    others: list[Any] = []
    if prior is not None:
        prior.fetch_others()
        for work in prior.beside:
            others.append(work)
    for work in beside:
        work.prepare()
    chunk.load_rest()
    # With many blocks what they need comes first: DVE has time for the prior later.
    rows.beside = [[chunk]]
    later: list[Any] = []
    for work in others:
        if rows.tiles.num_blocks > MANY_BLOCKS:
            rows.beside[0].append(work)
        else:
            later.append([work])
    if prior is None:
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
    chunk.finish_upto(rows.tiles.num_blocks - 1)
    for work in others:
        work.finish()
    # The first trip of a loop finds the rings of buffers as the later ones do.
    rows.drain()


def attend_last_blocks(
    rows: Any,  # BoundedRows or ExactRows
    chunk: ChunkStream,
    num_first: int,
    result: ShareResult,
) -> None:
    """The other blocks over the chunk, after the prior; earlier results are stored beside."""
    if num_first > 0:
        result.add_block(num_first - 1)
    rows.result = result
    rows.beside = [[result]]
    for block in range(num_first, rows.tiles.num_blocks):
        rows.attend_chunk(chunk.chunk.keys, chunk.chunk.values, block, True)
    rows.drain()
    result.finish()


def blocks_before_prior(tiles: ShareTiles) -> int:
    """Blocks that are computed over the chunk before the prior.

    The others, the last ones, are left for the end: as many as it takes to hide the normalisation
    of all tiles on DVE (some 0.3 us each) behind exp on ACT (some 0.43 us per key tile), as long as
    those before have a key tile for each row tile, whose preparation they hide.
    """
    before = 0
    for block in range(tiles.num_blocks):
        before = before + tiles.num_seen(block)
    block = tiles.num_blocks
    hidden = 0
    while block > 1 and 10 * hidden < 7 * tiles.num_tiles:
        keys = tiles.num_seen(block - 1)
        if before - keys < tiles.num_tiles:
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


def scale_values(tiles: ShareTiles, factor: nl.NkiTensor) -> None:
    """Divide the value columns of the accumulators by a [128, 1] factor, not the row sums."""
    inverse = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=inverse, data=factor)
    width = tiles.d + 1
    own = tiles.acc.ap(
        [[tiles.num_tiles * width, PARTITIONS], [width, tiles.num_tiles], [1, tiles.d]]
    )
    nisa.tensor_scalar(dst=own, data=own, op0=nl.multiply, operand0=inverse)


def new_flags(num_q_heads: int) -> nl.NkiTensor:
    """[1, H] int32 SBUF, zero: no share has failed."""
    flags = nl.ndarray((1, num_q_heads), dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=flags, value=0)
    return flags


def write_flag(
    result: ShareResult,
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
