"""The chunk over itself, and its result: the part that prefill with and without prior share."""

from .backend import nisa, nl
from .loading import RowTiles, load_row_tiles, transpose_row_tiles
from .softmax import first_step, next_step, normalise, score_tile
from .tile_schedule import MACRO_TILES, PARTITIONS


def attend_chunk(
    q: nl.NkiTensor,  # [H, S, d] HBM
    k: nl.NkiTensor,  # [KV, S, d] HBM
    v: nl.NkiTensor,  # [KV, S, d] HBM
    kv_head: int,
    valid: nl.NkiTensor,  # [128, S / 128] uint8: real rows
    causal: nl.NkiTensor,  # [128, tiles * 128] uint8, its last tile the diagonal
    scale: float,
) -> tuple[nl.NkiTensor, nl.NkiTensor, nl.NkiTensor, nl.NkiTensor]:
    """Causal attention of a KV head's query heads over the chunk, not yet normalised.

    Returns q_t [d, G * S] and the softmax state of the G * S / 128 row tiles: neg_shift and
    row_sum [128, tiles], acc [128, tiles * d], fp32.
    """
    num_q_heads, num_rows, d = q.shape
    group = num_q_heads // k.shape[0]
    num_tiles = num_rows // PARTITIONS
    q_rows = load_row_tiles(q, kv_head * group * num_rows, group, valid)
    q_t = transpose_row_tiles(RowTiles(q_rows, d, d), group * num_tiles)
    k_rows = load_row_tiles(k, kv_head * num_rows, 1, valid)
    k_t = transpose_row_tiles(RowTiles(k_rows, d, d), num_tiles)
    values = load_row_tiles(v, kv_head * num_rows, 1, valid)

    state_tiles = group * num_tiles
    neg_shift = nl.ndarray((PARTITIONS, state_tiles), dtype=nl.float32, buffer=nl.sbuf)
    row_sum = nl.ndarray((PARTITIONS, state_tiles), dtype=nl.float32, buffer=nl.sbuf)
    acc = nl.ndarray((PARTITIONS, state_tiles * d), dtype=nl.float32, buffer=nl.sbuf)
    mask_tiles = causal.shape[1] // PARTITIONS
    for head in range(group):
        for row_tile in range(num_tiles):
            t = head * num_tiles + row_tile
            queries = q_t[:, t * PARTITIONS : (t + 1) * PARTITIONS]
            for first in range(0, row_tile + 1, MACRO_TILES):
                end = min(first + MACRO_TILES, row_tile + 1)
                scores = score_tile(queries, k_t[:, first * PARTITIONS : end * PARTITIONS])
                seen = None
                if end == row_tile + 1:
                    seen = causal[:, (mask_tiles - end + first) * PARTITIONS :]
                step = first_step
                if first > 0:
                    step = next_step
                step(
                    scores,
                    seen,
                    RowTiles(values, d, d, first * d),
                    scale,
                    neg_shift[:, t : t + 1],
                    row_sum[:, t : t + 1],
                    acc[:, t * d : (t + 1) * d],
                )
    return q_t, neg_shift, row_sum, acc


def store_rows(
    out: nl.NkiTensor,  # [H, S, d] HBM
    first_row: int,
    num_groups: int,
    row_sum: nl.NkiTensor,  # [128, groups * tiles]
    acc: nl.NkiTensor,  # [128, groups * tiles * d]
    valid: nl.NkiTensor,  # [128, tiles] uint8
) -> None:
    """Normalise and store num_groups * tiles row tiles; rows that are not valid become zero."""
    d = out.shape[-1]
    tiles = valid.shape[1]
    total = num_groups * tiles
    normalise(row_sum, acc, d)
    rows = nl.ndarray((PARTITIONS, total * d), dtype=out.dtype, buffer=nl.sbuf)
    nisa.select_reduce(
        dst=rows,
        predicate=valid.ap([[tiles, PARTITIONS], [0, num_groups], [1, tiles], [0, d]]),
        on_true=acc,
        on_false=0.0,
    )
    nisa.dma_copy(
        dst=out.ap([[d, PARTITIONS], [PARTITIONS * d, total], [1, d]], offset=first_row * d),
        src=rows,
    )
