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

    is_async = True

    def _advance(self, step: Step) -> None:
        super()._advance(step)
        drafts = step.spec_token_ids
        changed: list[tuple[Request, int, list[int]]] = []
        self._transaction.record((_restore_placeholders, changed))
        for request in step.running + step.admitted:
            if request.is_prefill_chunk:
                continue
            changed.append((request, request.num_output_placeholders, request.spec_token_ids))
            request.num_output_placeholders += 1 + len(drafts.get(request.request_id, ()))
            # The next drafts are not known either; the runner fills them in.
            request.spec_token_ids = [-1] * self.num_spec_tokens

    def _accept_tokens(
        self, request: Request, tokens: list[int]
    ) -> tuple[list[int], RequestStatus | None]:
        if request.num_output_placeholders == 0:
            # A frame from before a second reset: the first one's count of it was overwritten.
            return [], None
        accepted, status = super()._accept_tokens(request, tokens)
        num_placeholders = request.num_output_placeholders - len(accepted)
        if num_placeholders < 0:
            raise ValueError(
                f"sampled_token_ids={tokens} of {request.request_id!r}: must be at most "
                f"{request.num_output_placeholders} tokens, so many are in flight"
            )
        request.num_output_placeholders = num_placeholders
        # Blocks that hold tokens still in flight have no content to be found by.
        num_known = request.num_computed_tokens - num_placeholders
        if num_known >= request.blocks_due_at and request.status is RequestStatus.RUNNING:
            self.kv_cache_manager.cache_blocks(request, num_known)
        return accepted, status


def _restore_placeholders(changed: list[tuple[Request, int, list[int]]]) -> None:
    for request, num_output_placeholders, spec_token_ids in changed:
        request.num_output_placeholders = num_output_placeholders
        request.spec_token_ids = spec_token_ids
