"""The way back: sampled tokens and drafts of a step into the requests."""

from collections.abc import Iterable

from .output import DraftTokenIds, EngineCoreOutput, ModelRunnerOutput, SchedulerOutput
from .prefix_digests import MAX_TOKEN_ID, pack_tokens
from .request import Request, RequestStatus
from .request_pool import RequestPool
from .stop import stop_reason, stop_status
from .validation import check_kind


class StepUpdate(RequestPool):
    """Takes the output of steps in."""

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """Append the tokens of a step, end the requests that they complete, and report both.

        Requests that ended meanwhile are passed over: an id may be used again once the steps that
        computed it have come back. ValueError, nothing changed, when the output lacks a scheduled
        request, has more tokens for it than the step can give, or holds something else than tokens.
        """
        check_kind("scheduler_output", scheduler_output, SchedulerOutput)
        check_kind("model_runner_output", model_runner_output, ModelRunnerOutput)
        outputs = []
        ended = []
        drafts = scheduler_output.scheduled_spec_decode_tokens
        reached: dict[str, int] = {}
        touched: list[tuple[Request, int, int]] = []
        with self._transaction:
            self._transaction.record((_restore_tokens, touched))
            for request_id, tokens in _sampled(scheduler_output, model_runner_output):
                request = self.requests.get(request_id)
                if request is None:
                    continue
                if tokens is None:
                    raise ValueError(
                        f"model_runner_output.req_ids lacks {request_id!r}: "
                        "must hold every request that the step scheduled"
                    )
                if not tokens:
                    continue
                touched.append((request, request.num_tokens, request.num_output_placeholders))
                num_drafts = len(drafts[request_id]) if request_id in drafts else 0
                if len(tokens) > 1 + num_drafts:
                    raise ValueError(
                        f"sampled_token_ids={tokens} of {request_id!r}: must be at most "
                        f"{1 + num_drafts} tokens, so many the step samples"
                    )
                if request.num_output_tokens == 0:
                    reached = reached or _tokens_reached(scheduler_output)
                    if reached[request_id] < request.num_prompt_tokens:
                        raise ValueError(
                            f"sampled_token_ids={tokens} of {request_id!r}: must be empty, the "
                            f"step computes {reached[request_id]} of {request.num_prompt_tokens} "
                            "prompt tokens"
                        )
                if request.async_tokens_to_discard > 0:
                    self._discard_tokens(request, 1 + num_drafts)
                    continue
                if num_drafts:
                    self._reject_drafts(request, num_drafts - (len(tokens) - 1))
                new_tokens, status = self._accept_tokens(request, tokens)
                if status is not None:
                    self._end(request, status)
                    request.stop_reason = stop_reason(request)
                    ended.append(request)
                    outputs.append(
                        EngineCoreOutput(
                            request_id, new_tokens, status.finish_reason, request.stop_reason
                        )
                    )
                elif new_tokens:
                    outputs.append(EngineCoreOutput(request_id, new_tokens))
            self._forget(ended)
            self._transaction.record((setattr, self, "_in_flight", self._in_flight))
            self._in_flight = [
                step for step in self._in_flight if step.output is not scheduler_output
            ]
            return outputs

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Set the drafts that the next step may schedule; a prompt in chunks takes none.

        ValueError, nothing changed, for lists of different lengths.
        """
        for request_id, tokens in _by_request(draft_token_ids):
            request = self.requests.get(request_id)
            if request is not None:
                request.spec_token_ids = [] if request.is_prefill_chunk else tokens

    def update_draft_token_ids_in_output(
        self, draft_token_ids: DraftTokenIds, scheduler_output: SchedulerOutput
    ) -> None:
        """Put drafts in the place of the -1 with which an asynchronous step was scheduled.

        A request gets as many as the step has for it; missing ones stay -1 and are counted in
        `num_invalid_spec_tokens`. ValueError, nothing changed, for lists of different lengths.
        """
        check_kind("scheduler_output", scheduler_output, SchedulerOutput)
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        drafts: dict[str, list[int]] = {}
        num_invalid: dict[str, int] = {}
        for request_id, tokens in _by_request(draft_token_ids):
            if request_id in self.requests and request_id in scheduled:
                num_drafts = len(scheduled[request_id])
                valid = tokens[:num_drafts]
                num_missing = num_drafts - len(valid)
                if num_missing:
                    num_invalid[request_id] = num_missing
                drafts[request_id] = valid + [-1] * num_missing
        scheduled |= drafts
        scheduler_output.num_invalid_spec_tokens = num_invalid

    def _discard_tokens(self, request: Request, num_tokens: int) -> None:
        """Drop tokens that were in flight when `reset_prefix_cache` preempted the request.

        vLLM 0.24 counts a frame as one token whatever drafts it carries, and so drops later frames
        as well, and moves the resumed request back by the rejected ones.
        """
        self._record_request(request)
        request.async_tokens_to_discard -= num_tokens

    def _reject_drafts(self, request: Request, num_rejected: int) -> None:
        """Take back the positions of drafts that the model did not accept."""
        self._record_request(request)
        if request.num_computed_tokens > 0:
            request.num_computed_tokens -= num_rejected
        if request.num_output_placeholders > 0:
            request.num_output_placeholders -= num_rejected

    def _accept_tokens(
        self, request: Request, tokens: list[int]
    ) -> tuple[list[int], RequestStatus | None]:
        """Append tokens up to the one that ends the request; these, and its status if it ends."""
        num_before = request.num_tokens
        for token in tokens:
            # The usual case inline: a call for each token would be a tenth of the update.
            if token.__class__ is not int or not 0 <= token <= MAX_TOKEN_ID:
                _check_token(request, token)
            request.output_token_ids.append(token)
            request.num_output_tokens += 1
            request.num_tokens = num_tokens = request.num_tokens + 1
            if num_tokens % self.block_size == 0:
                self.kv_cache_manager.hash_last_block(request)
            if token in request.end_token_ids or num_tokens >= request.max_num_tokens:
                status = stop_status(request)
                if status is not None:
                    return tokens[: num_tokens - num_before], status
        return tokens, None


def _restore_tokens(touched: list[tuple[Request, int, int]]) -> None:
    for request, num_tokens, num_output_placeholders in touched:
        request.truncate(num_tokens)
        request.num_output_placeholders = num_output_placeholders


def _tokens_reached(scheduler_output: SchedulerOutput) -> dict[str, int]:
    """Computed tokens of each scheduled request after the step."""
    scheduled, cached = (
        scheduler_output.num_scheduled_tokens,
        scheduler_output.scheduled_cached_reqs,
    )
    before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    before |= {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
    return {request_id: before[request_id] + scheduled[request_id] for request_id in scheduled}


def _check_token(request: Request, token: int) -> None:
    try:
        pack_tokens([token])
    except ValueError as error:
        raise ValueError(f"sampled_token_ids of {request.request_id!r}: {error}") from error


def _by_request(drafts: DraftTokenIds) -> list[tuple[str, list[int]]]:
    check_kind("draft_token_ids", drafts, DraftTokenIds)
    req_ids, tokens = drafts.req_ids, drafts.draft_token_ids
    if len(req_ids) != len(tokens):
        raise ValueError(f"{len(req_ids)} req_ids but {len(tokens)} draft_token_ids")
    return list(zip(req_ids, map(list, tokens), strict=True))


def _sampled(
    scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
) -> Iterable[tuple[str, list[int] | None]]:
    """Each scheduled request with its tokens, in scheduling order; None when there is no entry."""
    req_ids, tokens = model_runner_output.req_ids, model_runner_output.sampled_token_ids
    if len(req_ids) != len(tokens):
        raise ValueError(
            f"model_runner_output: {len(req_ids)} req_ids but {len(tokens)} sampled_token_ids"
        )
    scheduled = scheduler_output.num_scheduled_tokens
    if req_ids == list(scheduled):
        return zip(req_ids, tokens, strict=True)
    by_id = dict(zip(req_ids, tokens, strict=True))
    if len(by_id) < len(req_ids):
        raise ValueError(f"model_runner_output.req_ids={req_ids}: must name each request once")
    return ((request_id, by_id.get(request_id)) for request_id in scheduled)
