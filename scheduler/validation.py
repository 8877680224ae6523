"""Requests that no scheduler takes."""

from .errors import RequestError
from .prefix_cache import MAX_TOKEN_ID
from .request import Request, RequestStatus


def check_request(request: Request) -> None:
    """Raise RequestError for a request that is malformed or was in use before."""
    request_id = request.request_id
    if request.status is not RequestStatus.WAITING or request.num_computed_tokens:
        raise RequestError(request_id, f"was used before, it is {request.status.name}")
    if not request.prompt_token_ids:
        raise RequestError(request_id, "prompt_token_ids is empty: must hold at least one token")
    if request.max_tokens < 1:
        raise RequestError(request_id, f"max_tokens={request.max_tokens}: must be at least 1")
    if request.min_tokens < 0:
        raise RequestError(request_id, f"min_tokens={request.min_tokens}: must be at least 0")
    lowest, highest = min(request.prompt_token_ids), max(request.prompt_token_ids)
    if lowest < 0 or highest > MAX_TOKEN_ID:
        raise RequestError(
            request_id,
            f"prompt_token_ids holds {lowest if lowest < 0 else highest}: "
            f"must be within 0..{MAX_TOKEN_ID}",
        )
