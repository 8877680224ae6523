"""What a request has produced."""

from dataclasses import dataclass, field

from ..scheduler import Request
from ..scheduler.output import FinishReason
from .llama import Float32Array


@dataclass
class Completion:
    """What a request has produced so far."""

    request: Request
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    logits: list[Float32Array] = field(default_factory=list)
    """Logits [vocab] behind each token, when the engine keeps them."""
    error: str | None = None
    """What went wrong, when `finish_reason` is "error"."""

    @property
    def token_ids(self) -> list[int]:
        """Tokens produced."""
        return self.request.output_token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        """None while the request runs."""
        return self.request.status.finish_reason
