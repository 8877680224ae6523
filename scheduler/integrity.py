"""Invariants of a scheduler between two calls, checked from scratch."""

from collections import Counter
from collections.abc import Iterator

from ..reference.paging import NULL_BLOCK_ID
from .errors import IntegrityError
from .kv_cache_manager import KVCacheManager
from .prefix_digests import PrefixDigests, pack_tokens
from .request import Request, RequestStatus
from .request_pool import RequestPool


def check_integrity(pool: RequestPool) -> None:
    """Raise IntegrityError naming the first broken invariant. O(blocks + tokens)."""
    requests = list(pool.requests.values())
    _check_queues(pool, requests)
    for request in requests:
        _check_request(pool, request)
    _check_blocks(pool.kv_cache_manager, requests)
    if pool.kv_cache_manager.prefix_cache is not None:
        _check_prefix_cache(pool.kv_cache_manager, requests)


def _require(valid: bool, invariant: str, detail: object) -> None:
    if not valid:
        raise IntegrityError(invariant, str(detail))


def _check_queues(pool: RequestPool, requests: list[Request]) -> None:
    waiting, running = list(pool.waiting), pool.running
    queued = Counter(map(id, [*waiting, *running]))
    _require(
        queued == Counter(map(id, requests)),
        "each live request stands in exactly one queue",
        f"requests {requests}, waiting {waiting}, running {running}",
    )
    for request_id, request in pool.requests.items():
        _require(
            request.request_id == request_id,
            "requests are filed under their ids",
            f"{request} under {request_id!r}",
        )
    for request in running:
        _require(
            request.status is RequestStatus.RUNNING, "running requests have status RUNNING", request
        )
    for request in waiting:
        _require(
            request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED),
            "waiting requests have status WAITING or PREEMPTED",
            request,
        )
        _require(
            not request.block_ids and request.num_computed_tokens == 0,
            "waiting requests own no blocks and have nothing computed",
            f"{request} with blocks {request.block_ids}",
        )
    _require(
        len(running) <= pool.max_num_running_reqs,
        "at most max_num_seqs requests run",
        f"{len(running)} of {pool.max_num_running_reqs}",
    )


def _check_request(pool: RequestPool, request: Request) -> None:
    num_prompt, num_output = len(request.prompt_token_ids), len(request.output_token_ids)
    _require(
        (request.num_prompt_tokens, request.num_output_tokens, request.num_tokens)
        == (num_prompt, num_output, num_prompt + num_output),
        "token counts equal the lengths of the token lists",
        request,
    )
    _require(
        request.num_computed_tokens >= 0
        and request.num_output_placeholders >= 0
        and request.async_tokens_to_discard >= 0,
        "counts are not negative",
        f"{request} with {request.num_output_placeholders} placeholders and "
        f"{request.async_tokens_to_discard} tokens to discard",
    )
    num_covered = len(request.block_ids) * pool.block_size
    _require(
        num_covered >= min(request.num_computed_tokens, pool.max_model_len),
        "computed tokens lie in blocks",
        f"{request} with {num_covered} slots",
    )


def _check_blocks(manager: KVCacheManager, requests: list[Request]) -> None:
    pool = manager.block_pool
    owners: Counter[int] = Counter()
    for request in requests:
        _require(
            len(set(request.block_ids)) == len(request.block_ids),
            "a block stands once in a block table",
            f"{request} with {request.block_ids}",
        )
        owners.update(request.block_ids)
    for block, count in enumerate(pool.ref_counts):
        _require(
            count == owners[block],
            "the reference count of a block is the number of its owners",
            f"block {block}: {count}, owners {owners[block]}",
        )
    free = list(_walk(manager))
    _require(
        len(free) == pool.num_free_blocks,
        "the free list is as long as counted",
        f"{len(free)}, counted {pool.num_free_blocks}",
    )
    expected = set(range(pool.num_blocks)) - set(owners) - {NULL_BLOCK_ID}
    _require(
        set(free) == expected and NULL_BLOCK_ID not in owners,
        "free, owned and null blocks are all blocks",
        f"leaked {sorted(expected - set(free))}, free and owned {sorted(set(free) - expected)}, "
        f"null block owned {owners[NULL_BLOCK_ID]} times",
    )
    num_owners = sum(bool(request.block_ids) for request in requests)
    _require(
        manager.num_owners == num_owners,
        "requests with blocks are counted",
        f"{num_owners}, counted {manager.num_owners}",
    )


def _walk(manager: KVCacheManager) -> Iterator[int]:
    """The free list forwards, each link checked against the one backwards."""
    pool = manager.block_pool
    for position, (before, block) in enumerate(pool.free_links()):
        _require(
            position < pool.num_blocks and pool.is_linked(before, block),
            "the free list is one ring, forwards and backwards",
            f"at {before} -> {block}",
        )
        if block != NULL_BLOCK_ID:
            yield block


def _check_prefix_cache(manager: KVCacheManager, requests: list[Request]) -> None:
    cache = manager.prefix_cache
    assert cache is not None
    block_hash, found = cache.block_hash, cache.blocks_by_digest()
    cached = {block: digest for block, digest in enumerate(block_hash) if digest is not None}
    _require(NULL_BLOCK_ID not in cached, "the null block is not cached", cached)
    for digest, prefix in cache.unhashed_prefixes().items():
        _require(
            bool(prefix.unhashed)
            and prefix.packed is not None
            and prefix.digests == [digest]
            and all(block_hash[block] == digest for block in prefix.unhashed),
            "an unhashed block is filed under the first digest of its prefix",
            f"{prefix.unhashed}",
        )
    digest_of = {block: digest for digest, blocks in found.items() for block in blocks}
    unhashed = {block for prefix in cache.unhashed_prefixes().values() for block in prefix.unhashed}
    _require(
        Counter(block for blocks in found.values() for block in blocks) == Counter(cached.keys())
        and all(digest_of[block] == cached[block] for block in cached.keys() - unhashed),
        "a cached block is found under its digest and no other",
        f"cached {sorted(cached)}, found {found}",
    )
    for request in requests:
        tokens = pack_tokens(request.all_token_ids)
        digests = PrefixDigests(manager.block_size, request.cache_salt, tokens).all_digests()
        _require(
            request.prefix is not None and request.prefix.all_digests() == digests,
            "a request has the digests of its full blocks",
            request,
        )
        table = request.block_ids[: request.num_cached_blocks]
        _require(
            [digest_of.get(block) for block in table] == digests[: request.num_cached_blocks],
            "a request's cached blocks carry its digests",
            f"{request} with {table}",
        )
