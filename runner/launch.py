"""A step on its way through the runner: what each request computes, and what comes back."""

from concurrent.futures import Future
from dataclasses import dataclass, field

from ..scheduler import ModelRunnerOutput, SchedulerOutput
from .compile_plan import GraphShape
from .llama import Float32Array
from .padding import Row


class RowError(RuntimeError):
    """Some requests of a step cannot be computed; the others can."""

    def __init__(self, reasons: dict[str, str]) -> None:
        super().__init__(", ".join(f"request {i!r}: {why}" for i, why in reasons.items()))
        self.reasons = reasons


@dataclass
class StepResult:
    """What a step gave back. Times are readings of `perf_counter`."""

    output: ModelRunnerOutput
    shape: GraphShape | None = None
    """The compiled shape that ran; None when nothing was scheduled."""
    num_tokens: int = 0
    """Real tokens computed."""
    num_prior_tokens: int = 0
    """Tokens of the scheduled requests that were in the cache before."""
    logits: dict[str, Float32Array] = field(default_factory=dict)
    """Logits [tokens, vocab] behind the sampled tokens of each request that samples."""
    started: float = 0.0
    ended: float = 0.0


@dataclass
class RequestState:
    """What the runner remembers of a request."""

    num_prompt_tokens: int
    token_ids: list[int]
    """Prompt and sampled tokens."""
    block_ids: list[int]
    num_computed_tokens: int
    """Tokens in the cache before the step at hand."""


@dataclass(frozen=True)
class StepRow(Row):
    """What one request computes in a step."""

    req_id: str
    state: RequestState
    num_known: int
    """Leading tokens that are no drafts."""
    samples: bool
    """Whether the step reaches the end of the known tokens."""
    awaits_token: bool
    """Whether its token is the one that the step before samples."""


class Launch:
    """A step between `submit` and `collect`."""

    def __init__(self, scheduled: SchedulerOutput) -> None:
        self.req_ids = list(scheduled.num_scheduled_tokens)
        self.rows: list[StepRow] = []
        self.future: Future[StepResult] = Future()
        self.before: Launch | None = None
        """The step that runs before this one, until both have run."""
        self.old_block_ids: list[tuple[RequestState, list[int]]] = []

    @property
    def error(self) -> BaseException | None:
        """What the step raised; None for one that has not ended."""
        is_over = self.future.done() and not self.future.cancelled()
        return self.future.exception() if is_over else None
