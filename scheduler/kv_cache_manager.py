"""Blocks for requests: prefix hits, new blocks, caching of full blocks, giving all back."""

from collections.abc import Iterable, Sequence
from itertools import islice

from ..reference.paging import num_blocks_for
from .block_pool import BlockPool
from .config import SchedulerConfig
from .prefix_digests import block_digests, pack_tokens, root_digest
from .request import Request


class KVCacheManager:
    """Gives requests their blocks, in vLLM's order; one full-attention KV cache group.

    `Request.block_ids` is a request's block table, `num_cached_blocks` how many of its leading
    blocks are cached, and `blocks_due_at` the number of computed tokens from which `allocate_slots`
    has something to do for it: the scheduler need not ask before.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.block_size = config.block_size
        self.max_model_len = config.max_model_len
        self.num_lookahead_tokens = config.num_lookahead_tokens
        self.watermark_blocks = int(config.watermark * config.num_blocks)
        self.enable_caching = config.enable_prefix_caching
        self.block_pool = BlockPool(config.num_blocks)
        self.num_owners = 0
        """Requests that own blocks."""
        self.num_blocks_reserved = 0
        """Sum of the blocks that each owner can need, as if they shared none."""
        self.num_blocks_to_come = 0
        """Blocks that their owners do not have yet and may come to need, if nobody is preempted."""
        self.newly_cached: list[tuple[int, bytes]] = []
        """Blocks that were cached since the list was last exchanged, with their digests."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be taken; cached ones that nobody uses count."""
        return len(self.block_pool.free)

    def hash_prompt(self, request: Request, packed_prompt: bytes) -> None:
        """Compute the digests of the blocks that the prompt fills, if prefix caching is on."""
        if self.enable_caching:
            root = root_digest(request.cache_salt)
            request.block_hashes = block_digests(root, packed_prompt, self.block_size)

    def hash_outputs(self, request: Request) -> None:
        """Compute the digests of the blocks that latest tokens filled, if prefix caching is on."""
        hashes, block_size = request.block_hashes, self.block_size
        if self.enable_caching:
            begin = len(hashes) * block_size
            packed = pack_tokens(request.token_ids_from(begin))
            parent = hashes[-1] if hashes else root_digest(request.cache_salt)
            hashes += block_digests(parent, packed, block_size)

    def get_computed_blocks(self, request: Request) -> list[int]:
        """Cached blocks that a request can start from.

        The last token is always computed, so a hit ends before it.
        """
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return []
        max_blocks = (request.num_tokens - 1) // self.block_size
        return self.block_pool.find_longest_hit(islice(request.block_hashes, max_blocks))

    def admit(
        self,
        request: Request,
        num_new_tokens: int,
        hit_blocks: list[int],
        *,
        full_sequence_must_fit: bool,
        keep_watermark: bool,
    ) -> bool:
        """Give a waiting request its hits and slots for `num_new_tokens` more tokens.

        `hit_blocks` come from `get_computed_blocks`. False, nothing changed, when too few blocks
        are free: with `keep_watermark` the configured share stays free, and with
        `full_sequence_must_fit` all known tokens of the request must fit, not only the new ones.
        """
        pool, block_size = self.block_pool, self.block_size
        num_hits = len(hit_blocks)
        num_tokens = num_hits * block_size + num_new_tokens
        num_slots = min(num_tokens + self.num_lookahead_tokens, self.max_model_len)
        if full_sequence_must_fit:
            num_slots = max(num_slots, min(request.num_tokens, self.max_model_len))
        # Taking a hit that nobody uses shrinks the free list like taking a new block.
        num_unused_hits = pool.num_unowned(hit_blocks)
        num_needed = max(num_blocks_for(num_slots, block_size) - num_hits, 0) + num_unused_hits
        if keep_watermark:
            num_needed += self.watermark_blocks
        if num_needed > len(pool.free):
            return False
        pool.share(hit_blocks)
        request.block_ids = hit_blocks
        request.num_cached_blocks = num_hits
        self.num_owners += 1
        self.num_blocks_reserved += request.num_blocks_needed
        self.num_blocks_to_come += request.num_blocks_needed - num_hits
        self.allocate_slots(request, num_tokens)
        return True

    def fits_to_the_end(self, request: Request, num_spare_blocks: int) -> bool:
        """Whether a waiting request and all owners can have all blocks that they may need.

        Blocks that an owner shares with the request count once; `num_spare_blocks` stay free.
        """
        room = len(self.block_pool.free) - self.num_blocks_to_come - num_spare_blocks
        num_missing = request.num_blocks_needed - room
        if num_missing <= 0:
            return True
        hits = self.get_computed_blocks(request) if self.num_owners else []
        return num_missing <= len(hits) - self.block_pool.num_unowned(hits)

    def allocate_slots(self, request: Request, num_tokens: int) -> list[int] | None:
        """Let a running request grow to `num_tokens` tokens and cache the blocks that they fill.

        Blocks are cached before their tokens are computed, so requests of one step can share them.
        Returns the new block ids (none may be needed), or None, nothing changed, when too few
        blocks are free.
        """
        # Comparisons here and below: calls of min() would take a tenth of the time.
        num_slots = num_tokens + self.num_lookahead_tokens
        if num_slots > self.max_model_len:
            num_slots = self.max_model_len
        num_new_blocks = num_blocks_for(num_slots, self.block_size) - len(request.block_ids)
        new_blocks: list[int] = []
        if num_new_blocks > 0:
            if num_new_blocks > len(self.block_pool.free):
                return None
            new_blocks = self.block_pool.take(num_new_blocks)
            request.block_ids += new_blocks
            self.num_blocks_to_come -= num_new_blocks
        # Tokens that may be rejected or are not known yet have no final content.
        num_known = request.num_tokens
        self.cache_blocks(request, num_known if num_known < num_tokens else num_tokens)
        return new_blocks

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Let others find the request's blocks that its first `num_tokens` tokens fill."""
        block_ids, block_size = request.block_ids, self.block_size
        due = len(block_ids) * block_size - self.num_lookahead_tokens + 1
        if self.enable_caching:
            num_cached = request.num_cached_blocks
            # A prompt beyond max_model_len, which the base kinds take, has blocks for a part of it.
            num_full = min(num_tokens // block_size, len(block_ids))
            if num_full > num_cached:
                blocks = block_ids[num_cached:num_full]
                hashes = request.block_hashes[num_cached:num_full]
                self.newly_cached += zip(blocks, hashes, strict=True)
                self.block_pool.insert(blocks, hashes)
                request.num_cached_blocks = num_cached = num_full
            full_at = (num_cached + 1) * block_size
            if full_at < due:
                due = full_at
        request.blocks_due_at = due

    def uncache(self, request: Request) -> None:
        """Let nobody find the request's blocks that were cached since the list was exchanged."""
        owned = set(request.block_ids)
        self.block_pool.evict(cached for cached in self.newly_cached if cached[0] in owned)

    def free(self, requests: Sequence[Request]) -> None:
        """Take all blocks from requests; cached ones stay findable until they are taken."""
        owners = [request for request in requests if request.block_ids]
        tables = [request.block_ids for request in owners]
        self.block_pool.release(tables)
        num_needed = sum([request.num_blocks_needed for request in owners])
        self.num_blocks_reserved -= num_needed
        self.num_blocks_to_come -= num_needed - sum(map(len, tables))
        self.num_owners -= len(owners)
        for request in owners:
            request.block_ids = []
            request.num_cached_blocks = request.blocks_due_at = 0

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False, nothing changed, while a request owns blocks."""
        if self.num_owners:
            return False
        self.block_pool.clear()
        return True

    def rebuild(self, requests: Iterable[Request]) -> None:
        """Derive everything anew from the block tables of all live `requests`, after a failure."""
        owners = [request for request in requests if request.block_ids]
        block_hash = self.block_pool.block_hash
        for request in owners:
            table = request.block_ids
            cached = (index for index, block in enumerate(table) if block_hash[block] is None)
            request.num_cached_blocks = next(cached, len(table))
            request.blocks_due_at = 0
        self.num_owners = len(owners)
        self.num_blocks_reserved = sum(r.num_blocks_needed for r in owners)
        self.num_blocks_to_come = sum(r.num_blocks_needed - len(r.block_ids) for r in owners)
        self.block_pool.rebuild(request.block_ids for request in owners)
