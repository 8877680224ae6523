"""Invariants of a scheduler between two calls, checked from scratch."""

from collections import Counter
from typing import TYPE_CHECKING

from ..reference.paging import NULL_BLOCK_ID
from .errors import IntegrityError
from .kv_cache_manager import KVCacheManager
from .prefix_digests import block_digests, pack_tokens, root_digest
from .request import Request, RequestStatus

if TYPE_CHECKING:
    from .scheduler import Scheduler


def check_integrity(pool: "Scheduler") -> None:
    """Raise IntegrityError naming the first broken invariant. O(blocks + tokens)."""
    requests = list(pool.requests.values())
    _check_queues(pool, requests)
    for request in requests:
        _check_request(pool, request)
    _check_blocks(pool.kv_cache_manager, requests)
    if pool.kv_cache_manager.enable_caching:
        _check_prefix_cache(pool.kv_cache_manager, requests)


def _require(valid: bool, invariant: str, detail: object) -> None:
    if not valid:
        raise IntegrityError(invariant, str(detail))


def _check_queues(pool: "Scheduler", requests: list[Request]) -> None:
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


def _check_request(pool: "Scheduler", request: Request) -> None:
    num_prompt, num_output = len(request.prompt_token_ids), len(request.output_token_ids)
    _require(
        (request.num_prompt_tokens, request.num_output_tokens, request.num_tokens)
        == (num_prompt, num_output, num_prompt + num_output),
        "token counts equal the lengths of the token lists",
        request,
    )
    in_flight = [step for step in pool.steps_in_flight if request in step.requests]
    num_in_flight = sum(step.num_scheduled_tokens[request.request_id] for step in in_flight)
    _require(
        request.num_in_flight_tokens == num_in_flight,
        "tokens in flight are those of the steps in flight",
        f"{request} with {request.num_in_flight_tokens}, steps have {num_in_flight}",
    )
    _require(
        request.num_computed_tokens >= 0
        and request.num_output_placeholders >= 0
        and 0 <= request.num_stale_output_tokens <= num_in_flight,
        "counts are not negative",
        f"{request} with {request.num_output_placeholders} placeholders and "
        f"{request.num_stale_output_tokens} stale tokens",
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
    free = list(pool.free)
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
    needs = [(r.num_blocks_needed, len(r.block_ids)) for r in requests if r.block_ids]
    reserved, owned = sum(need for need, _ in needs), sum(own for _, own in needs)
    _require(
        (manager.num_blocks_reserved, manager.num_blocks_to_come) == (reserved, reserved - owned),
        "blocks that owners may need are counted",
        f"{reserved} and {owned} owned, counted {manager.num_blocks_reserved} and "
        f"{manager.num_blocks_to_come} to come",
    )


def _check_prefix_cache(manager: KVCacheManager, requests: list[Request]) -> None:
    pool = manager.block_pool
    cached = {block: digest for block, digest in enumerate(pool.block_hash) if digest is not None}
    found = pool.blocks_by_digest()
    _require(NULL_BLOCK_ID not in cached, "the null block is not cached", cached)
    digest_of = {block: digest for digest, blocks in found.items() for block in blocks}
    _require(
        digest_of == cached and len(cached) == sum(map(len, found.values())),
        "a cached block is found under its digest and no other",
        f"cached {sorted(cached)}, found {found}",
    )
    for request in requests:
        tokens = pack_tokens(request.all_token_ids)
        digests = block_digests(root_digest(request.cache_salt), tokens, manager.block_size)
        _require(
            request.block_hashes == digests,
            "a request has the digests of its full blocks",
            request,
        )
        table = request.block_ids[: request.num_cached_blocks]
        _require(
            [cached.get(block) for block in table] == digests[: request.num_cached_blocks],
            "a request's cached blocks carry its digests",
            f"{request} with {table}",
        )
