"""The chunk over itself: the part that prefill with and without prior share."""

from .backend import nisa, nl
from .loading import RowTiles, load_row_tiles, transpose_features
from .softmax import ScoreScale, SoftmaxState, begin, first_step, new_state, next_step, score_tile
from .tile_schedule import MACRO_TILES, PARTITIONS, Share


def load_queries(
    q: nl.NkiTensor,  # [H, S, d] HBM
    share: Share,
    valid: nl.NkiTensor,  # [128, tiles of the share] uint8
) -> list[nl.NkiTensor]:
    """Query columns of a share per 128 features: [<= 128, heads * tiles * 128]."""
    rows = load_row_tiles(q, share.first_head, share.num_heads, share.row_tiles, valid)
    return transpose_features(rows, share.num_heads * len(share.row_tiles), q.shape[2])


def attend_chunk(
    queries: list[nl.NkiTensor],  # from load_queries
    k: nl.NkiTensor,  # [KV, S, d] HBM
    v: nl.NkiTensor,  # [KV, S, d] HBM
    kv_head: int,
    share: Share,
    every_valid: nl.NkiTensor,  # [128, S / 128] uint8: real rows of the chunk
    masks: list[nl.NkiTensor | None],  # from chunk_masks
    window: int | None,
    scale: float,
    sinks: nl.NkiTensor | None,  # [128, H] fp32
) -> SoftmaxState:
    """Causal attention of a share's rows over the chunk, not yet normalised.

    Row tile i of head h is tile h * len(row_tiles) + i of the state.
    """
    _, num_rows, d = k.shape
    every_tile: list[int] = []
    for tile in range(num_rows // PARTITIONS):
        every_tile.append(tile)
    k_rows = load_row_tiles(k, kv_head, 1, every_tile, every_valid)
    keys = transpose_features(k_rows, len(every_tile), d)
    values = load_row_tiles(v, kv_head, 1, every_tile, every_valid)

    tiles = len(share.row_tiles)
    state = new_state(PARTITIONS, share.num_heads * tiles, d)
    if sinks is not None:
        own = sinks.ap(
            [[sinks.shape[1], PARTITIONS], [1, share.num_heads], [0, tiles]],
            offset=share.first_head,
        )
        begin(state, scale, own)
    score_scale = ScoreScale(scale, -scale)
    for head in range(share.num_heads):
        for i in range(tiles):
            row_tile = share.row_tiles[i]
            t = head * tiles + i
            oldest = 0
            if window is not None:
                oldest = max(0, row_tile * PARTITIONS - window + 1) // PARTITIONS
            for level in range(len(masks)):
                end = row_tile + 1 - level * MACRO_TILES
                first = max(oldest, end - MACRO_TILES)
                if first < end:
                    mask = masks[level]
                    if mask is not None:
                        mask = mask[:, mask.shape[1] - (end - first) * PARTITIONS :]
                    step = next_step
                    if level == 0 and sinks is None:
                        step = first_step
                    scores = score_tile(
                        queries, t * PARTITIONS, PARTITIONS,
                        keys, first * PARTITIONS, (end - first) * PARTITIONS,
                    )  # fmt: skip
                    step(scores, mask, RowTiles(values, d, d, first * d), score_scale, state, t)
    return state


def scale_values(state: SoftmaxState, factor: nl.NkiTensor) -> None:
    """Divide the accumulators by a [128, 1] factor that later steps of values lack."""
    inverse = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=inverse, data=factor)
    nisa.tensor_scalar(dst=state.acc, data=state.acc, op0=nl.multiply, operand0=inverse)
