"""Errors of the scheduler. Every one leaves the scheduler as it was before the call."""


class RequestError(ValueError):
    """A request that the scheduler refuses; nothing was queued."""

    def __init__(self, request_id: str, reason: str) -> None:
        super().__init__(f"request {request_id!r}: {reason}")
        self.request_id = request_id
        self.reason = reason


class IntegrityError(RuntimeError):
    """A broken invariant of the scheduler's own state, found by `check_integrity`."""

    def __init__(self, invariant: str, detail: str) -> None:
        super().__init__(f"{invariant}: {detail}")
        self.invariant = invariant
