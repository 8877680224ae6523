"""The scheduler that decides a step before the tokens of the previous one are known."""

from .request import Request, RequestStatus
from .scheduler import Scheduler
from .step import Step


class AsyncScheduler(Scheduler):
    """Scheduler with one step in flight while the next is decided.

    A scheduled request that will sample gets an output placeholder for the token (and one for each
    draft), so that the next step can go on from it; the token takes the placeholder's place when it
    arrives.
    """

    def _advance(self, step: Step) -> None:
        super()._advance(step)
        for request in step.running + step.admitted:
            if request.is_prefill_chunk:
                continue
            self._record_request(request)
            num_drafts = len(step.spec_token_ids.get(request.request_id, ()))
            request.num_output_placeholders += 1 + num_drafts
            # The next drafts are not known either; the runner fills them in.
            request.spec_token_ids = [-1] * self.num_spec_tokens

    def _accept_tokens(
        self, request: Request, tokens: list[int]
    ) -> tuple[list[int], RequestStatus | None]:
        if request.async_tokens_to_discard > 0:
            # The step was in flight when reset_prefix_cache preempted the request.
            self._record_request(request)
            request.async_tokens_to_discard -= 1
            return [], None
        status_before = request.status
        accepted, status = super()._accept_tokens(request, tokens)
        if len(accepted) > request.num_output_placeholders:
            raise ValueError(
                f"sampled_token_ids={tokens} of {request.request_id!r}: must be at most "
                f"{request.num_output_placeholders} tokens, so many are in flight"
            )
        request.num_output_placeholders -= len(accepted)
        if status_before is RequestStatus.RUNNING:
            # Tokens in flight have no content yet.
            self.kv_cache_manager.cache_blocks(
                request, request.num_computed_tokens - request.num_output_placeholders
            )
        return accepted, status
