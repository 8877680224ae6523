"""All shares of a core, one after the other: the part that both prefill kernels have in common."""

from typing import Any

from ...backend import nl
from ...sizes import PARTITIONS
from ..loading import broadcast_row
from ..masks import share_rows, valid_rows
from ..softmax import ScoreScale
from ..tile_schedule import Share
from ..write_kv_cache_nki import CacheWriter
from .attend_share import attend_share, new_flags, share_sinks, store_flags, write_flag
from .bounded import BoundedRows
from .chunk_stream import ChunkKeys
from .exact_rows import ExactRows
from .paged_prior import PagedPrior
from .share_padding import Condition, ZeroRows, as_flag, real_rows
from .share_tiles import ShareTiles


class ShareLoop(nl.NKIObject):
    """Attention of a chunk over its prior and itself, share by share."""

    def __init__(
        self,
        q: nl.NkiTensor,  # [H, S, d] HBM
        k: nl.NkiTensor,  # [KV, S, d] HBM
        v: nl.NkiTensor,  # [KV, S, d] HBM
        out: nl.NkiTensor,  # [H, S, d] HBM, result
        num_tokens: nl.NkiTensor,  # [1, 1] int32 HBM
        scale: float,
        window: int | None,
        sinks: nl.NkiTensor | None,  # [1, H] fp32 HBM
        softmax: str,
    ) -> None:
        num_heads, num_rows, _ = q.shape
        self.q = q
        self.k = k
        self.v = v
        self.out = out
        self.scale = scale
        self.window = window
        self.softmax = softmax
        self.group = num_heads // k.shape[0]
        self.real = broadcast_row(num_tokens)
        self.every_valid = valid_rows(self.real, num_rows // PARTITIONS)
        self.every_sink: nl.NkiTensor | None = None
        if sinks is not None:
            self.every_sink = broadcast_row(sinks)
        self.flags = new_flags(num_heads)

    def run(
        self,
        shares: list[Share],
        prior: PagedPrior | None,
        writer: CacheWriter | None,  # of the chunk's own keys and values, not finished here
    ) -> None:
        """Every share with the softmax that was asked for."""
        zeros = ZeroRows(self.out, shares, 0, self.group)
        chunks: list[ChunkKeys] = []
        for share in shares:
            kv_head = share.first_head // self.group
            if zeros.first_head != kv_head * self.group:
                zeros = ZeroRows(self.out, shares, kv_head * self.group, self.group)
            beside: list[Any] = []
            if share.may_be_padding:
                zeros.finish()
            else:
                chunks.append(ChunkKeys(self.k, self.v, kv_head, self.every_valid))
                beside.append(zeros)
            if writer is not None and writer.stored_tiles() >= share.row_tiles[0]:
                beside.append(writer)
            self.attend(share, chunks[len(chunks) - 1], prior, beside)

    def attend(
        self,
        share: Share,
        keys: ChunkKeys,
        prior: PagedPrior | None,
        beside: list[Any],  # work that the share's macros leave time for
    ) -> None:
        """One share: bounded, exact, or exact where the check of the bounded one fails."""
        own_valid = share_rows(self.every_valid, share)
        own_sinks = share_sinks(self.every_sink, share)
        condition = Condition(None)
        if share.may_be_padding:
            condition = Condition(as_flag(real_rows(self.real, share)))
        prior_scale = ScoreScale(self.scale, -self.scale)
        value_scale = None
        if prior is not None:
            prior_scale = prior.score_scale(keys.kv_head, self.scale)
            value_scale = prior.value_scale(keys.kv_head)
        if self.softmax != "exact":
            tiles = ShareTiles(share, self.q.shape[2], self.q.dtype, self.window)
            bounded = BoundedRows(tiles, self.q.dtype, self.scale)
            stream = None
            if prior is not None:
                stream = prior.stream(bounded, keys, self.real)
            result = attend_share(
                bounded, self.q, keys, stream, own_valid, value_scale, own_sinks, prior_scale,
                condition, self.out, beside,
            )  # fmt: skip
            condition = Condition(write_flag(result, bounded, self.flags, share, condition))
            beside = []
        if self.softmax != "bounded":
            tiles = ShareTiles(share, self.q.shape[2], self.q.dtype, self.window)
            exact = ExactRows(tiles, self.q.dtype, self.scale)
            stream = None
            if prior is not None:
                stream = prior.stream(exact, keys, self.real)
            attend_share(
                exact, self.q, keys, stream, own_valid, value_scale, own_sinks, prior_scale,
                condition, self.out, beside,
            )  # fmt: skip

    def store_flags(self, core: int, num_cores: int) -> nl.NkiTensor:
        """Which heads' shares failed the check of the bounded softmax, [cores, H] int32 HBM."""
        return store_flags(self.flags, core, num_cores)
