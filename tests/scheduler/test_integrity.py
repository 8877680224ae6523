"""Each broken invariant is named by `check_integrity`."""

from collections.abc import Callable

import pytest

from segattn.scheduler import (
    IntegrityError,
    ModelRunnerOutput,
    Request,
    RequestStatus,
    Scheduler,
    SchedulerConfig,
)


def busy_scheduler() -> Scheduler:
    """Block size 2: "a" and "b" share blocks 1 and 2 of the prefix [1, 2, 3, 4]; "c" waits."""
    scheduler = Scheduler(SchedulerConfig(2, 32, 32, 2, 9))
    for name, last in (("a", 5), ("b", 6), ("c", 7)):
        scheduler.add_request(Request(name, [1, 2, 3, 4, last], 9))
    output = scheduler.schedule()
    scheduler.update_from_output(output, ModelRunnerOutput(["a", "b"], [[7], [7]]))
    a, b = scheduler.running
    assert (a.block_ids, b.block_ids) == ([1, 2, 3], [1, 2, 4])
    assert list(scheduler.kv_cache_manager.block_pool.free) == [5, 6, 7, 8]
    return scheduler


def swap_status(scheduler: Scheduler) -> None:
    scheduler.running[0].status = RequestStatus.WAITING


def forget_waiting(scheduler: Scheduler) -> None:
    scheduler.waiting.pop_request()


def run_twice(scheduler: Scheduler) -> None:
    scheduler.running.append(scheduler.running[0])


def misfile(scheduler: Scheduler) -> None:
    scheduler.requests["x"] = scheduler.requests.pop("c")


def run_waiting(scheduler: Scheduler) -> None:
    scheduler.waiting.peek_request().status = RequestStatus.RUNNING


def compute_waiting(scheduler: Scheduler) -> None:
    scheduler.waiting.peek_request().num_computed_tokens = 1


def run_too_many(scheduler: Scheduler) -> None:
    request = scheduler.waiting.pop_request()
    request.status = RequestStatus.RUNNING
    scheduler.running.append(request)


def lose_token(scheduler: Scheduler) -> None:
    scheduler.running[0].output_token_ids.pop()


def owe_placeholders(scheduler: Scheduler) -> None:
    scheduler.running[0].num_output_placeholders = -1


def compute_beyond(scheduler: Scheduler) -> None:
    scheduler.running[0].num_computed_tokens = 7


def repeat_block(scheduler: Scheduler) -> None:
    scheduler.running[0].block_ids[2] = 1


def miscount_references(scheduler: Scheduler) -> None:
    scheduler.kv_cache_manager.block_pool.ref_counts[1] = 1


def leak_block(scheduler: Scheduler) -> None:
    pool = scheduler.kv_cache_manager.block_pool
    pool.take(1)
    pool.ref_counts[5] = 0


def miscount_owners(scheduler: Scheduler) -> None:
    scheduler.kv_cache_manager.num_owners = 1


def uncache_silently(scheduler: Scheduler) -> None:
    scheduler.kv_cache_manager.block_pool.block_hash[2] = None


def cache_null_block(scheduler: Scheduler) -> None:
    scheduler.kv_cache_manager.block_pool.insert([0], [b"digest"])


def forget_digest(scheduler: Scheduler) -> None:
    scheduler.running[0].block_hashes.pop()


def exchange_digests(scheduler: Scheduler) -> None:
    scheduler.running[0].block_hashes.reverse()


def miscount_growth(scheduler: Scheduler) -> None:
    scheduler.kv_cache_manager.num_blocks_to_come -= 1


def lose_a_flight(scheduler: Scheduler) -> None:
    scheduler.running[0].num_in_flight_tokens = 1


def exchange_blocks(scheduler: Scheduler) -> None:
    block_ids = scheduler.running[0].block_ids
    block_ids[:2] = reversed(block_ids[:2])


@pytest.mark.parametrize(
    ("damage", "invariant"),
    [
        (forget_waiting, "each live request stands in exactly one queue"),
        (run_twice, "each live request stands in exactly one queue"),
        (misfile, "requests are filed under their ids"),
        (swap_status, "running requests have status RUNNING"),
        (run_waiting, "waiting requests have status WAITING or PREEMPTED"),
        (compute_waiting, "waiting requests own no blocks and have nothing computed"),
        (run_too_many, "at most max_num_seqs requests run"),
        (lose_token, "token counts equal the lengths of the token lists"),
        (owe_placeholders, "counts are not negative"),
        (compute_beyond, "computed tokens lie in blocks"),
        (repeat_block, "a block stands once in a block table"),
        (miscount_references, "the reference count of a block is the number of its owners"),
        (leak_block, "free, owned and null blocks are all blocks"),
        (miscount_owners, "requests with blocks are counted"),
        (miscount_growth, "blocks that owners may need are counted"),
        (lose_a_flight, "tokens in flight are those of the steps in flight"),
        (uncache_silently, "a cached block is found under its digest and no other"),
        (cache_null_block, "the null block is not cached"),
        (forget_digest, "a request has the digests of its full blocks"),
        (exchange_digests, "a request has the digests of its full blocks"),
        (exchange_blocks, "a request's cached blocks carry its digests"),
    ],
)
def test_damage_is_named(damage: Callable[[Scheduler], None], invariant: str) -> None:
    scheduler = busy_scheduler()
    scheduler.check_integrity()
    damage(scheduler)
    with pytest.raises(IntegrityError) as caught:
        scheduler.check_integrity()
    assert caught.value.invariant == invariant
    assert str(caught.value).startswith(f"{invariant}: ")
