"""Arguments that no scheduler takes."""

from .errors import RequestError
from .prefix_digests import pack_tokens
from .request import Request, RequestStatus

_INTEGERS = (("max_tokens", 1), ("min_tokens", 0), ("priority", None))


def check_kind(name: str, value: object, kind: type) -> None:
    """Raise TypeError when an argument is not of a kind."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}={value!r}: must be {kind.__name__}")


def check_fields(request: Request) -> None:
    """Raise RequestError when a field of the request, its prompt excepted, is malformed."""
    check_kind("request", request, Request)
    request_id = request.request_id
    if not isinstance(request_id, str):
        raise RequestError(request_id, "request_id must be a string")
    for name, least in _INTEGERS:
        value = getattr(request, name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise RequestError(request_id, f"{name}={value!r}: must be an integer")
        if least is not None and value < least:
            raise RequestError(request_id, f"{name}={value}: must be at least {least}")
    arrival_time, cache_salt = request.arrival_time, request.cache_salt
    # A time that is not a number has no place in a queue.
    if not isinstance(arrival_time, (int, float)) or arrival_time != arrival_time:
        raise RequestError(request_id, f"arrival_time={arrival_time!r}: must be a number")
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise RequestError(request_id, f"cache_salt={cache_salt!r}: must be a string or None")
    skip_reading = request.skip_reading_prefix_cache
    if not isinstance(skip_reading, bool):
        raise RequestError(
            request_id, f"skip_reading_prefix_cache={skip_reading!r}: must be True or False"
        )
    try:
        (cache_salt or "").encode()
    except UnicodeEncodeError as error:
        raise RequestError(request_id, f"cache_salt={cache_salt!r}: must be Unicode") from error
    for token in request.end_token_ids:
        if not isinstance(token, int):
            raise RequestError(request_id, f"stop token {token!r}: must be an integer")


def check_request(request: Request) -> bytes:
    """The request's prompt, packed. RequestError when it is malformed or was in use before."""
    check_fields(request)
    request_id = request.request_id
    if request.status is not RequestStatus.WAITING or request.num_computed_tokens:
        raise RequestError(request_id, f"was used before, it is {request.status.name}")
    if not request.prompt_token_ids:
        raise RequestError(request_id, "prompt_token_ids is empty: must hold at least one token")
    try:
        return pack_tokens(request.prompt_token_ids)
    except ValueError as error:
        raise RequestError(request_id, f"prompt_token_ids: {error}") from error
