"""The way back: sampled tokens and drafts of a step, checked first, then into the requests."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .output import DraftTokenIds, EngineCoreOutput, ModelRunnerOutput, SchedulerOutput
from .prefix_digests import pack_tokens
from .request import Request, RequestStatus
from .step import Step
from .stop import stop_reason, stop_status
from .validation import check_kind

if TYPE_CHECKING:
    from .scheduler import Scheduler


_Before = tuple[Request, int, int, int, int, int, list[int], RequestStatus]
"""A request with its tokens, counters, blocks and status from before a step came back."""


def check_results(
    step: Step, results: ModelRunnerOutput, requests: Mapping[str, Request]
) -> list[list[int]]:
    """The tokens of each scheduled request, in scheduling order.

    ValueError when one of the live `requests` that had to sample has none, another one has some,
    one has more than the step can give, or something is not a token.
    """
    req_ids, rows = results.req_ids, results.sampled_token_ids
    if len(req_ids) != len(rows):
        raise ValueError(
            f"model_runner_output: {len(req_ids)} req_ids but {len(rows)} sampled_token_ids"
        )
    scheduled, drafts, unsampled = step.num_scheduled_tokens, step.spec_token_ids, step.unsampled
    if req_ids != list(scheduled):
        by_id = dict(zip(req_ids, rows, strict=True))
        if len(by_id) < len(req_ids):
            raise ValueError(f"model_runner_output.req_ids={req_ids}: must name each request once")
        for name in by_id.keys() - scheduled.keys():
            raise ValueError(
                f"model_runner_output.req_ids has {name!r}: the step does not compute it"
            )
        for name in (scheduled.keys() & requests.keys()) - by_id.keys() - unsampled:
            raise ValueError(
                f"model_runner_output.req_ids lacks {name!r}: must hold every request that samples"
            )
        rows = [by_id.get(name, []) for name in scheduled]
    # Most steps: one token each, and all checked at once.
    samples_one_each = not drafts and not unsampled and set(map(len, rows)) == {1}
    if samples_one_each and _are_tokens([row[0] for row in rows]):
        return rows
    for name, row in zip(scheduled, rows, strict=True):
        most = 0 if name in unsampled else 1 + len(drafts.get(name, ()))
        if not min(most, name in requests) <= len(row) <= most:
            allowed = f"1 to {most} tokens" if most else "empty, the step does not end its prompt"
            raise ValueError(f"sampled_token_ids={row} of {name!r}: must be {allowed}")
        try:
            pack_tokens(row)
        except ValueError as error:
            raise ValueError(f"sampled_token_ids of {name!r}: {error}") from error
    return rows


def _are_tokens(tokens: list[int]) -> bool:
    try:
        pack_tokens(tokens)
    except ValueError:
        return False
    return True


def receive(
    scheduler: "Scheduler", step: Step, sampled: Sequence[list[int]]
) -> list[EngineCoreOutput]:
    """Append checked tokens and end the requests that they complete. All or nothing."""
    outputs: list[EngineCoreOutput] = []
    ended: list[Request] = []
    before: list[_Before] = []
    running, requests = scheduler.running, scheduler.requests
    drafts, num_scheduled_tokens = step.spec_token_ids, step.num_scheduled_tokens
    caches_drafts = scheduler.num_spec_tokens > 0
    manager = scheduler.kv_cache_manager
    block_size = scheduler.block_size if manager.enable_caching else scheduler.max_model_len + 1
    try:
        for request, tokens in zip(step.requests, sampled, strict=True):
            request_id = request.request_id
            if requests.get(request_id) is not request:
                continue
            before.append(
                (
                    request,
                    request.num_tokens,
                    request.num_computed_tokens,
                    request.num_in_flight_tokens,
                    request.num_stale_output_tokens,
                    request.num_output_placeholders,
                    request.block_ids,
                    request.status,
                )
            )
            num_scheduled = num_scheduled_tokens[request_id]
            request.num_in_flight_tokens = num_in_flight = (
                request.num_in_flight_tokens - num_scheduled
            )
            is_stale = request.num_stale_output_tokens > 0
            if is_stale:
                request.num_stale_output_tokens -= num_scheduled
                if request.drop_stale_output:
                    continue
            if not tokens:
                continue
            num_placeholders = request.num_output_placeholders
            num_given = len(tokens)
            if drafts and request_id in drafts and not is_stale:
                # Take back the positions of drafts that the model did not accept.
                num_rejected = len(drafts[request_id]) + 1 - num_given
                if request.num_computed_tokens > 0:
                    request.num_computed_tokens -= num_rejected
                if num_placeholders > 0:
                    request.num_output_placeholders -= num_rejected
            # One token inline: a call for each would be a tenth of the update.
            if num_given == 1:
                token = tokens[0]
                request.output_token_ids.append(token)
                request.num_output_tokens += 1
                request.num_tokens = num_tokens = request.num_tokens + 1
                status = None
                if token in request.end_token_ids or num_tokens >= request.max_num_tokens:
                    status = stop_status(request)
            else:
                tokens, status = _append(request, tokens)
                num_tokens = request.num_tokens
            if num_tokens // block_size > len(request.block_hashes):
                manager.hash_outputs(request)
            if not is_stale:
                if num_placeholders > 0:
                    request.num_output_placeholders -= num_given
                if len(tokens) < num_given:
                    request.num_computed_tokens -= num_given - len(tokens)
                # Blocks whose tokens are in flight have no content to be found by.
                if (num_placeholders > 0 or caches_drafts) and (
                    request.status is RequestStatus.RUNNING
                ):
                    num_known = request.num_computed_tokens - num_in_flight
                    if num_known >= request.blocks_due_at:
                        manager.cache_blocks(request, num_known)
            if status is None:
                outputs.append(EngineCoreOutput(request_id, tokens))
                continue
            ended.append(request)
            request.status = status
            request.stop_reason = stop_reason(request)
            outputs.append(
                EngineCoreOutput(request_id, tokens, status.finish_reason, request.stop_reason)
            )
        if ended:
            running = running.copy()
            forget(scheduler, ended)
        scheduler.steps_in_flight.pop(0)
    except BaseException:
        _restore(scheduler, before)
        scheduler.running = running
        raise
    return outputs


def forget(scheduler: "Scheduler", ended: list[Request]) -> list[str]:
    """Free the blocks of requests that are over and take them out of their queues; their ids.

    No function is called for each of them: many may end at once.
    """
    ids = [request.request_id for request in ended]
    waiting = [request for request in ended if not request.block_ids]
    if waiting:
        scheduler.waiting.remove_requests(waiting)
        scheduler.deferred.difference_update(ids)
    if len(waiting) < len(ended):
        if len(ended) == 1:
            scheduler.running.remove(ended[0])
        else:
            gone = set(ended)
            scheduler.running = [request for request in scheduler.running if request not in gone]
        scheduler.kv_cache_manager.free(ended)
    scheduler.finished_req_ids.update(ids)
    for request_id in ids:
        del scheduler.requests[request_id]
    return ids


def _restore(
    scheduler: "Scheduler",
    before: Sequence[_Before],
) -> None:
    for request, num_tokens, computed, in_flight, stale, placeholders, blocks, status in before:
        request.num_tokens = num_tokens
        request.num_output_tokens = num_tokens - request.num_prompt_tokens
        del request.output_token_ids[request.num_output_tokens :]
        del request.block_hashes[num_tokens // scheduler.block_size :]
        request.num_computed_tokens = computed
        request.num_in_flight_tokens, request.num_stale_output_tokens = in_flight, stale
        request.num_output_placeholders = placeholders
        request.block_ids, request.status = blocks, status
        request.stop_reason = None
        scheduler.finished_req_ids.discard(request.request_id)
        scheduler.requests[request.request_id] = request
        if status != RequestStatus.RUNNING and request not in scheduler.waiting:
            scheduler.waiting.prepend_request(request)
    scheduler.kv_cache_manager.rebuild(scheduler.requests.values())


def _append(request: Request, tokens: list[int]) -> tuple[list[int], RequestStatus | None]:
    """Append tokens up to the one that ends the request; these, and its status if it ends."""
    for count, token in enumerate(tokens, 1):
        request.output_token_ids.append(token)
        request.num_output_tokens += 1
        request.num_tokens += 1
        status = stop_status(request)
        if status is not None:
            return tokens[:count], status
    return tokens, None


def drafts_by_request(drafts: DraftTokenIds) -> list[tuple[str, list[int]]]:
    """Request ids with copies of their drafts."""
    check_kind("draft_token_ids", drafts, DraftTokenIds)
    req_ids, tokens = drafts.req_ids, drafts.draft_token_ids
    if len(req_ids) != len(tokens):
        raise ValueError(f"{len(req_ids)} req_ids but {len(tokens)} draft_token_ids")
    return list(zip(req_ids, map(list, tokens), strict=True))


def place_drafts(
    drafts: list[tuple[str, list[int]]],
    scheduler_output: SchedulerOutput,
    requests: dict[str, Request],
) -> None:
    """Put drafts in the place of the -1 that a step was scheduled with."""
    scheduled = scheduler_output.scheduled_spec_decode_tokens
    placed: dict[str, list[int]] = {}
    num_invalid: dict[str, int] = {}
    for request_id, tokens in drafts:
        if request_id in requests and request_id in scheduled:
            num_drafts = len(scheduled[request_id])
            valid = tokens[:num_drafts]
            num_missing = num_drafts - len(valid)
            if num_missing:
                num_invalid[request_id] = num_missing
            placed[request_id] = valid + [-1] * num_missing
    scheduled |= placed
    scheduler_output.num_invalid_spec_tokens = num_invalid
