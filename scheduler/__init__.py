"""A scheduler with vLLM V1 semantics for one full-attention KV cache group."""

from .admission import Admission
from .config import PauseState, SchedulerConfig
from .errors import IntegrityError, RequestError
from .neuron import SchedulerState
from .neuron_scheduler import NeuronAsyncScheduler, NeuronScheduler
from .output import (
    CachedRequestData,
    DraftTokenIds,
    EngineCoreOutput,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from .policy import NeuronPolicy
from .request import Request, RequestStatus
from .scheduler import AsyncScheduler, Scheduler

__all__ = [
    "Admission",
    "AsyncScheduler",
    "CachedRequestData",
    "DraftTokenIds",
    "EngineCoreOutput",
    "IntegrityError",
    "ModelRunnerOutput",
    "NeuronAsyncScheduler",
    "NeuronPolicy",
    "NeuronScheduler",
    "NewRequestData",
    "PauseState",
    "Request",
    "RequestError",
    "RequestStatus",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerOutput",
    "SchedulerState",
]
