"""When a request is over."""

from .request import Request, RequestStatus


def stop_status(request: Request) -> RequestStatus | None:
    """Status that the request's latest output token ends it with, None when it goes on."""
    if request.output_token_ids[-1] in request.end_token_ids:
        return RequestStatus.FINISHED_STOPPED
    if request.num_tokens >= request.max_num_tokens:
        return RequestStatus.FINISHED_LENGTH_CAPPED
    return None


def stop_reason(request: Request) -> int | None:
    """The stop token that a stopped request ended with; the end-of-sequence token is none."""
    if request.status is not RequestStatus.FINISHED_STOPPED:
        return None
    token = request.output_token_ids[-1]
    return None if token == request.eos_token_id else token
