"""A scheduler with vLLM V1 semantics for one full-attention KV cache group."""

from .config import SchedulerConfig
from .errors import IntegrityError, RequestError
from .output import (
    CachedRequestData,
    DraftTokenIds,
    EngineCoreOutput,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from .pause_state import PauseState
from .request import Request, RequestStatus

__all__ = [
    "CachedRequestData",
    "DraftTokenIds",
    "EngineCoreOutput",
    "IntegrityError",
    "ModelRunnerOutput",
    "NewRequestData",
    "PauseState",
    "Request",
    "RequestError",
    "RequestStatus",
    "SchedulerConfig",
    "SchedulerOutput",
]
