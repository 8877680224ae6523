"""Blocks for requests: prefix hits, new blocks, caching of full blocks, giving all back."""

from collections.abc import Sequence

from ..reference.paging import num_blocks_for
from .block_pool import BlockPool
from .config import SchedulerConfig
from .prefix_cache import PrefixCache
from .prefix_digests import PrefixDigests, pack_tokens
from .request import Request
from .transaction import Transaction


class KVCacheManager:
    """Gives requests their blocks, in vLLM's order; one full-attention KV cache group.

    `Request.block_ids` is a request's block table, `num_cached_blocks` how many of its leading
    blocks the prefix cache knows, and `blocks_due_at` the number of computed tokens from which
    `allocate_slots` has something to do for it: the scheduler need not ask before.
    """

    def __init__(self, config: SchedulerConfig, transaction: Transaction) -> None:
        self.block_size = config.block_size
        self.max_model_len = config.max_model_len
        self.num_lookahead_tokens = config.num_lookahead_tokens
        self.watermark_blocks = int(config.watermark * config.num_blocks)
        self.prefix_cache = (
            PrefixCache(config.num_blocks, transaction) if config.enable_prefix_caching else None
        )
        self.block_pool = BlockPool(config.num_blocks, self.prefix_cache, transaction)
        self.num_owners = 0
        """Requests that own blocks."""
        self.newly_cached: list[tuple[int, PrefixDigests]] = []
        """Blocks cached since the list was last exchanged, with what they hold."""
        self._transaction = transaction
        # The request for which the common prefix was counted, and the count.
        self._common_prefix: tuple[Request, int] | None = None

    def hash_prompt(self, request: Request, packed_prompt: bytes) -> None:
        """Prepare the digests of the blocks that the prompt fills, if prefix caching is on."""
        if self.prefix_cache is not None:
            request.prefix = PrefixDigests(self.block_size, request.cache_salt, packed_prompt)
            self.prefix_cache.prepare(request.prefix)

    def hash_last_block(self, request: Request) -> None:
        """Take in the block that the latest token filled, if prefix caching is on."""
        prefix = request.prefix
        if prefix is not None:
            block = pack_tokens(request.last_token_ids(self.block_size))
            self._transaction.record((prefix.truncate, prefix.num_blocks))
            prefix.append(block)

    def get_computed_blocks(self, request: Request) -> list[int]:
        """Cached blocks that a request can start from.

        The last token is always computed, so a hit ends before it.
        """
        if self.prefix_cache is None or request.prefix is None or request.skip_reading_prefix_cache:
            return []
        max_blocks = (request.num_tokens - 1) // self.block_size
        return self.prefix_cache.find_longest_hit(request.prefix, max_blocks)

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
        num_unused_hits = pool.ref_counts_of(hit_blocks).count(0)
        num_needed = max(num_blocks_for(num_slots, block_size) - num_hits, 0) + num_unused_hits
        if keep_watermark:
            num_needed += self.watermark_blocks
        if num_needed > pool.num_free_blocks:
            return False
        self._add_owner(request, hit_blocks)
        self.allocate_slots(request, num_tokens)
        return True

    def allocate_slots(self, request: Request, num_tokens: int) -> list[int] | None:
        """Let a running request grow to `num_tokens` tokens and cache the blocks that they fill.

        Blocks are cached before their tokens are computed, so requests of one step can share them.
        Returns the new block ids (none may be needed), or None, nothing changed, when too few
        blocks are free.
        """
        pool, block_ids = self.block_pool, request.block_ids
        # Comparisons here and below: calls of min() would take a tenth of the time.
        num_slots = num_tokens + self.num_lookahead_tokens
        if num_slots > self.max_model_len:
            num_slots = self.max_model_len
        num_new_blocks = num_blocks_for(num_slots, self.block_size) - len(block_ids)
        new_blocks: list[int] = []
        if num_new_blocks > 0:
            if num_new_blocks > pool.num_free_blocks:
                return None
            self._transaction.record(
                (self._undo_append, request, len(block_ids), request.blocks_due_at)
            )
            new_blocks = pool.take(num_new_blocks)
            block_ids += new_blocks
        # Tokens that may be rejected or are not known yet have no final content.
        num_known = request.num_tokens
        self.cache_blocks(request, num_known if num_known < num_tokens else num_tokens)
        return new_blocks

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Let others find the request's blocks that its first `num_tokens` tokens fill."""
        block_ids, block_size = request.block_ids, self.block_size
        due = len(block_ids) * block_size - self.num_lookahead_tokens + 1
        if self.prefix_cache is not None and request.prefix is not None:
            num_cached = request.num_cached_blocks
            # A prompt beyond max_model_len, which the base kinds take, has blocks for a part of it.
            num_full = min(num_tokens // block_size, len(block_ids))
            if num_full > num_cached:
                filled = block_ids[num_cached:num_full]
                self.prefix_cache.insert(filled, request.prefix, num_cached)
                newly_cached = self.newly_cached
                self._transaction.record((setattr, self, "newly_cached", newly_cached))
                entries = [(block, request.prefix) for block in filled]
                self.newly_cached = [*newly_cached, *entries]
                self._transaction.record(
                    (self._set_cached, request, num_cached, request.blocks_due_at)
                )
                request.num_cached_blocks = num_cached = num_full
            full_at = (num_cached + 1) * block_size
            if full_at < due:
                due = full_at
        request.blocks_due_at = due

    def truncate(self, request: Request, num_blocks: int) -> None:
        """Take all but the first `num_blocks` blocks from a request, after a failed step."""
        block_ids = request.block_ids
        self._record_ownership(request)
        while self.prefix_cache is not None and request.num_cached_blocks:
            if self.prefix_cache.block_hash[block_ids[request.num_cached_blocks - 1]] is not None:
                break
            request.num_cached_blocks -= 1
        request.block_ids = block_ids[:num_blocks]
        request.blocks_due_at = 0
        self._common_prefix = None
        if num_blocks < len(block_ids):
            self.block_pool.release(block_ids[num_blocks:], 0)

    def free(self, request: Request) -> None:
        """Take all blocks from a request; cached ones stay findable until they are taken."""
        if not request.block_ids:
            return
        self._record_ownership(request)
        self.block_pool.release(request.block_ids, request.num_cached_blocks)
        request.block_ids = []
        request.num_cached_blocks = request.blocks_due_at = 0
        self.num_owners -= 1
        self._common_prefix = None

    def get_num_common_prefix_blocks(self, request: Request) -> int:
        """Leading blocks of `request` that every request with blocks shares.

        Always 0 without prefix caching, as in vLLM.
        """
        if self.prefix_cache is None:
            return 0
        if self.num_owners == 1:
            return len(request.block_ids)
        if self._common_prefix is None or self._common_prefix[0] is not request:
            ref_counts, count = self.block_pool.ref_counts, 0
            for block in request.block_ids:
                if ref_counts[block] != self.num_owners:
                    break
                count += 1
            self._common_prefix = (request, count)
        return self._common_prefix[1]

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False, nothing changed, while a request owns blocks."""
        if self.num_owners:
            return False
        if self.prefix_cache is not None:
            self.prefix_cache.clear()
        return True

    def _add_owner(self, request: Request, hit_blocks: Sequence[int]) -> None:
        self._record_ownership(request)
        if hit_blocks:
            self.block_pool.share(hit_blocks)
        request.block_ids = list(hit_blocks)
        request.num_cached_blocks = len(hit_blocks)
        self.num_owners += 1
        self._common_prefix = None

    def _record_ownership(self, request: Request) -> None:
        self._transaction.record(
            (
                self._set_ownership,
                request,
                request.block_ids,
                request.num_cached_blocks,
                request.blocks_due_at,
                self.num_owners,
            )
        )

    def _set_ownership(
        self, request: Request, block_ids: list[int], num_cached: int, due: int, num_owners: int
    ) -> None:
        request.block_ids = block_ids
        self._set_cached(request, num_cached, due)
        self.num_owners = num_owners
        self._common_prefix = None

    def _set_cached(self, request: Request, num_cached: int, due: int) -> None:
        request.num_cached_blocks = num_cached
        request.blocks_due_at = due

    def _undo_append(self, request: Request, num_blocks: int, due: int) -> None:
        del request.block_ids[num_blocks:]
        request.blocks_due_at = due
