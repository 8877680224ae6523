"""The chunk over itself with the exact softmax, for prefill with and without prior."""

from .backend import nisa, nl
from .loading import (
    RowTiles,
    each_element,
    load_row_tiles,
    new_columns,
    store_row_tiles,
    transpose_features,
    zero_rows,
)
from .masks import chunk_masks
from .paged_cache import PagedSegments
from .share_padding import Condition
from .softmax import (
    ScoreScale,
    SoftmaxState,
    begin,
    first_step,
    new_state,
    next_step,
    normalise,
    score_tile,
)
from .tile_schedule import MACRO_TILES, PARTITIONS, Share


def load_queries(
    q: nl.NkiTensor,  # [H, S, d] HBM
    share: Share,
    valid: nl.NkiTensor,  # [128, tiles of the share] uint8
    columns: list[nl.NkiTensor],  # from new_columns, result
) -> None:
    """Load and transpose the queries of a share."""
    d = q.shape[2]
    rows = load_row_tiles(q, share.first_head, share.num_heads, share.row_tiles)
    rows = zero_rows(rows, each_element(valid, share.num_heads, d), q.dtype)
    transpose_features(rows, share.num_heads * len(share.row_tiles), d, columns)


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
    state: SoftmaxState,  # result
) -> None:
    """Causal attention of a share's rows over the chunk, not yet normalised.

    Row tile i of head h is tile i * num_heads + h of the state.
    """
    _, num_rows, d = k.shape
    every_tile: list[int] = []
    for tile in range(num_rows // PARTITIONS):
        every_tile.append(tile)
    real = each_element(every_valid, 1, d)
    k_rows = zero_rows(load_row_tiles(k, kv_head, 1, every_tile), real, k.dtype)
    keys = new_columns(len(every_tile), d, k.dtype)
    transpose_features(k_rows, len(every_tile), d, keys)
    values = zero_rows(load_row_tiles(v, kv_head, 1, every_tile), real, v.dtype)

    tiles = len(share.row_tiles)
    if sinks is not None:
        own = sinks.ap(
            [[sinks.shape[1], PARTITIONS], [0, tiles], [1, share.num_heads]],
            offset=share.first_head,
        )
        begin(state, scale, own)
    score_scale = ScoreScale(scale, -scale)
    for i in range(tiles):
        row_tile = share.row_tiles[i]
        oldest = 0
        if window is not None:
            oldest = max(0, row_tile * PARTITIONS - window + 1) // PARTITIONS
        for head in range(share.num_heads):
            t = i * share.num_heads + head
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


def store_state(
    out: nl.NkiTensor,  # [H, S, d] HBM
    share: Share,
    state: SoftmaxState,  # normalised
    valid: nl.NkiTensor,  # [128, tiles of the share] uint8
) -> None:
    """Store a share's accumulators; padding rows are stored as zero."""
    rows = zero_rows(state.acc, each_element(valid, share.num_heads, out.shape[2]), out.dtype)
    store_row_tiles(out, share.first_head, share.num_heads, share.row_tiles, rows)


def scale_values(state: SoftmaxState, factor: nl.NkiTensor) -> None:
    """Divide the accumulators by a [128, 1] factor that later steps of values lack."""
    inverse = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=inverse, data=factor)
    nisa.tensor_scalar(dst=state.acc, data=state.acc, op0=nl.multiply, operand0=inverse)


class ExactShare(nl.NKIObject):
    """One share with the exact softmax, if a condition holds."""

    def __init__(
        self,
        share: Share,
        d: int,
        dtype: str,
        valid: nl.NkiTensor,  # [128, tiles of the share] uint8
        condition: Condition,
    ) -> None:
        tiles = share.num_heads * len(share.row_tiles)
        self.share = share
        self.valid = valid
        self.condition = condition
        self.queries = new_columns(tiles, d, dtype)
        self.state = new_state(PARTITIONS, tiles, d)

    def attend_chunk(
        self,
        q: nl.NkiTensor,  # [H, S, d] HBM
        k: nl.NkiTensor,  # [KV, S, d] HBM
        v: nl.NkiTensor,  # [KV, S, d] HBM
        kv_head: int,
        every_valid: nl.NkiTensor,  # [128, S / 128] uint8
        window: int | None,
        scale: float,
        sinks: nl.NkiTensor | None,  # [128, H] fp32
        value_scale: nl.NkiTensor | None = None,  # [128, 1] fp32
        prior: PagedSegments | None = None,
    ) -> None:
        """The chunk, the accumulators in units of `value_scale`; constants that `prior` needs."""

        def chunk(i: nisa.VirtualRegister | int) -> None:
            masks = chunk_masks(k.shape[1] // PARTITIONS, window)
            if prior is not None:
                prior.clear_staging()
                prior.write_positions()
            load_queries(q, self.share, self.valid, self.queries)
            attend_chunk(
                self.queries, k, v, kv_head, self.share, every_valid, masks, window, scale, sinks,
                self.state,
            )  # fmt: skip
            if value_scale is not None:
                scale_values(self.state, value_scale)

        self.condition.run(chunk)

    def end_of(self, count: nl.NkiTensor) -> nisa.VirtualRegister:
        """The [1, 1] int32 count as a loop bound, 0 if the share does not run."""
        flag = self.condition.flag
        if flag is not None:
            product = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
            nisa.tensor_tensor(dst=product, data1=count, data2=flag, op=nl.multiply)
            count = product
        end = nisa.register_alloc()
        nisa.register_load(end, count)
        return end

    def store(self, out: nl.NkiTensor, value_scale: float | nl.NkiTensor) -> None:
        """Normalise and store the share's rows."""

        def last(i: nisa.VirtualRegister | int) -> None:
            normalise(self.state.acc, self.state.row_sum, value_scale)
            store_state(out, self.share, self.state, self.valid)

        self.condition.run(last)
