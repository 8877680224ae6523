"""The record of one executed step: what tables, logs, metrics and timelines are made from."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One step of the engine, which ran one compiled graph."""

    index: int
    state: str
    """State of the scheduler: ACTIVE_PREFILL or ACTIVE_DECODE."""
    graph: str
    """Name of the compiled graph."""
    request_ids: tuple[str, ...]
    num_tokens: int
    """Real tokens computed."""
    num_tokens_padded: int
    """Tokens of the bucket, the real ones included."""
    num_prior_tokens: int
    """Tokens of its requests that were in the cache before."""
    num_new_tokens: int
    """Tokens sampled."""
    num_running: int
    """Requests admitted, after the step."""
    num_waiting: int
    """Requests queued, after the step."""
    kv_cache_usage: float
    """Share of the usable blocks that requests owned during the step."""
    start_seconds: float
    """When its scheduling began, since the engine was made."""
    prepare_seconds: float
    """Time of the host to schedule and to pad."""
    run_start_seconds: float
    """When its graph began. With async_scheduling the next step is prepared meanwhile."""
    run_seconds: float
    """Time of the host for graph and sampling; on the interpreter nothing of a device."""
