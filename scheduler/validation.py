"""Requests that no scheduler takes."""

from .errors import RequestError
from .prefix_digests import pack_tokens
from .request import Request, RequestStatus


def check_request(request: Request) -> bytes:
    """The request's prompt, packed. RequestError when it is malformed or was in use before."""
    request_id = request.request_id
    if request.status is not RequestStatus.WAITING or request.num_computed_tokens:
        raise RequestError(request_id, f"was used before, it is {request.status.name}")
    if not request.prompt_token_ids:
        raise RequestError(request_id, "prompt_token_ids is empty: must hold at least one token")
    if request.max_tokens < 1:
        raise RequestError(request_id, f"max_tokens={request.max_tokens}: must be at least 1")
    if request.min_tokens < 0:
        raise RequestError(request_id, f"min_tokens={request.min_tokens}: must be at least 0")
    try:
        return pack_tokens(request.prompt_token_ids)
    except ValueError as error:
        raise RequestError(request_id, f"prompt_token_ids: {error}") from error
