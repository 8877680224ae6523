"""write_kv_cache: store each token's K and V in its slot of the paged cache.

Formula. For every token t with slot_mapping[t] = s >= 0 and every KV head h:
    k_cache[s // block_size, h, s % block_size] = k[h, t] / k_scale[h], likewise v,
held within +-240 for an fp8 cache, rounded to the cache's dtype.

Supported range and errors. Any number of tokens T >= 1 with T * (KV + 4) <= 350,000, which keeps
the program below 20,000 instructions; KV * d <= 16,384; block_size a power of two; caches in the
dtype of k and v, or fp8 with scales. Slots are distinct and below num_blocks * block_size; -1 is
skipped. `segattn.kernels.write_kv_cache` raises ValueError for anything else; the kernel only
asserts shapes.

Loop nest. Tiles of 128 tokens -> K, V: one scatter for all KV heads. Without scales it copies HBM
to HBM; with them a tile is loaded, scaled head by head and cast on the way.

Layouts. Token t sits on partition t % 128 of the index tile [128, tiles] and of the scaled tile
[128, KV * d]. A pre-transposed K cache [num_blocks, KV, d, block_size] is written by
transposed_key_writer.py: whole blocks by way of columns [d, (KV head, slot)], then single tokens.

On-chip memory. Index tiles of 16 B per 128 tokens and partition, 1 KiB at T = 8192; with scales
KV * d * (b + 4 + 1) B per tile in flight, 7 KiB for 8 heads of 128 in bf16.

Numerics. Without scales bit copies. With scales one fp32 multiplication by the reciprocal, which
DVE rounds correctly to about one unit in the last place, then one rounding to the cache's dtype.
"""

from ..backend import nisa, nki, nl
from ..sizes import PARTITIONS
from .cache.paged_cache import scatter_rows, slot_rows, to_cache_dtype
from .cache.transposed_key_writer import key_writer
from .loading import inverse_scales


def quantise(
    tokens: nl.NkiTensor,  # rows x KV x d HBM
    num_rows: int,
    inverse_scales: nl.NkiTensor,  # [128, KV] fp32
    cache: nl.NkiTensor,  # [num_blocks, KV, block_size, d]
) -> nl.NkiTensor:
    """The tokens divided by their head's scale in the cache's dtype, [rows, KV * d] SBUF."""
    _, num_kv_heads, _, d = cache.shape
    loaded = nl.ndarray((num_rows, num_kv_heads * d), dtype=tokens.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=loaded, src=tokens)
    scaled = nl.ndarray((num_rows, num_kv_heads * d), dtype=nl.float32, buffer=nl.sbuf)
    for head in range(num_kv_heads):
        nisa.tensor_scalar(
            dst=scaled[:, head * d : (head + 1) * d], data=loaded[:, head * d : (head + 1) * d],
            op0=nl.multiply, operand0=inverse_scales[0:num_rows, head : head + 1],
        )  # fmt: skip
    stored = nl.ndarray((num_rows, num_kv_heads * d), dtype=cache.dtype, buffer=nl.sbuf)
    to_cache_dtype(scaled, stored)
    return stored


class CacheWriter(nl.NKIObject):
    """Stores a chunk tile by tile: all at once, or in steps beside other work.

    A scatter may touch any row of its cache, so two into one cache wait for each other; the
    sources take turns.
    """

    def __init__(
        self,
        chunks: list[nl.NkiTensor],  # each [KV, T, d] HBM
        caches: list[nl.NkiTensor],  # each [num_blocks, KV, block_size, d] HBM
        slot_mapping: nl.NkiTensor,  # [T] int32 HBM
        scales: list[nl.NkiTensor | None],  # each [1, KV] fp32 HBM
    ) -> None:
        self.chunks = chunks
        self.caches = caches
        self.slot_mapping = slot_mapping
        self.scales = scales
        self.inverse_scales: list[nl.NkiTensor | None] = []
        self.tiles: list[tuple[int, nl.NkiTensor]] = []  # first token, cache rows [tokens, 1]
        self.done = 0
        self.steps = 0
        self.vector_ns = 0.0

    def prepare(self) -> None:
        """Load the slots, unless that was done; to be called before the first step."""
        if self.steps > 0:
            return
        num_kv_heads, num_tokens, _ = self.chunks[0].shape
        block_size = self.caches[0].shape[2]
        slot_mapping = self.slot_mapping
        for scale in self.scales:
            self.inverse_scales.append(inverse_scales(scale))
        full_tiles = num_tokens // PARTITIONS
        rest = num_tokens - full_tiles * PARTITIONS
        if full_tiles > 0:
            rows = slot_rows(slot_mapping, 0, PARTITIONS, full_tiles, block_size, num_kv_heads)
            for t in range(full_tiles):
                self.tiles.append((t * PARTITIONS, rows[:, t : t + 1]))
        if rest > 0:
            first = full_tiles * PARTITIONS
            rows = slot_rows(slot_mapping, first, rest, 1, block_size, num_kv_heads)
            self.tiles.append((first, rows))
        self.steps = len(self.tiles) * len(self.chunks)

    def step(self) -> None:
        """Store the next tile of one of the chunks."""
        source = self.done % len(self.chunks)
        first, rows = self.tiles[self.done // len(self.chunks)]
        chunk, cache = self.chunks[source], self.caches[source]
        num_kv_heads, num_tokens, d = chunk.shape
        num_rows = rows.shape[0]
        tokens = chunk.ap([[d, num_rows], [num_tokens * d, num_kv_heads], [1, d]], offset=first * d)
        inverse = self.inverse_scales[source]
        if inverse is not None:
            tokens = quantise(tokens, num_rows, inverse, cache)
        scatter_rows(rows, tokens, cache)
        self.done = self.done + 1

    def stored_tiles(self) -> int:
        """Tiles of 128 tokens from the first on that are stored in all caches."""
        return self.done // len(self.chunks)

    def finish(self) -> None:
        """Store the tiles that are left."""
        while self.done < self.steps:
            self.step()


@nki.jit
def write_kv_cache_kernel(
    k: nl.NkiTensor,  # [KV, T, d]
    v: nl.NkiTensor,  # [KV, T, d]
    k_cache: nl.NkiTensor,  # [num_blocks, KV, block_size, d], changed in place
    v_cache: nl.NkiTensor,  # [num_blocks, KV, block_size, d], changed in place
    slot_mapping: nl.NkiTensor,  # [T] int32
    k_scales: nl.NkiTensor | None,  # [1, KV] fp32
    v_scales: nl.NkiTensor | None,  # [1, KV] fp32
    key_tokens: nl.NkiTensor | None = None,  # plan of key_write_plan.py, with which the K cache
    key_blocks: nl.NkiTensor | None = None,  # is [num_blocks, KV, d, block_size]
    key_rest: nl.NkiTensor | None = None,
    num_key_rest: nl.NkiTensor | None = None,
) -> tuple[nl.NkiTensor, nl.NkiTensor]:
    """Store k and v through slot_mapping; returns the caches."""
    assert k.shape == v.shape, "k and v must have one shape"
    chunks, caches, scales = [k, v], [k_cache, v_cache], [k_scales, v_scales]
    keys = key_writer(k, k_cache, k_scales, key_tokens, key_blocks, key_rest, num_key_rest)
    if keys is None:
        assert k_cache.shape == v_cache.shape, "k_cache and v_cache must have one shape"
    else:
        chunks, caches, scales = [v], [v_cache], [v_scales]
        keys.write()
    writer = CacheWriter(chunks, caches, slot_mapping, scales)
    writer.prepare()
    writer.finish()
    return k_cache, v_cache
