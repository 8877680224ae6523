"""The two phases of a request, and the padded size of a step of either."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from ..reference.paging import smallest_bucket
from .output import SchedulerOutput, StepKind
from .request import Request

PhaseTest = Literal["known", "prompt"]


def is_prefill(
    num_computed_tokens: int,
    num_prompt_tokens: int,
    num_tokens: int,
    phase_test: PhaseTest = "known",
) -> bool:
    """Whether a request that has computed so many of its known tokens is in its prefill phase.

    `num_tokens` counts prompt and outputs without drafts and placeholders. A resumed request has
    outputs to recompute, which is prefill work too: "known" sees that, "prompt" does not.
    """
    if phase_test == "prompt":
        return num_computed_tokens < num_prompt_tokens
    return num_computed_tokens < max(num_prompt_tokens, num_tokens - 1)


def prefills_of(requests: Iterable[Request], phase_test: PhaseTest) -> list[Request]:
    """The requests that are in their prefill phase; `is_prefill` inlined, it runs every step."""
    if phase_test == "prompt":
        return [r for r in requests if r.num_computed_tokens < r.num_prompt_tokens]
    return [
        r
        for r in requests
        if r.num_computed_tokens < r.num_prompt_tokens or r.num_computed_tokens < r.num_tokens - 1
    ]


def padded_counts(
    output: SchedulerOutput,
    requests: Mapping[str, Request],
    buckets: Sequence[int],
    phase_test: PhaseTest,
) -> tuple[dict[str, int], StepKind]:
    """Tokens per request of a step with each prefill chunk padded to its bucket, and its kind.

    RuntimeError when the step mixes the phases.
    """
    padded = dict(output.num_scheduled_tokens)
    # Our own base knows; the literal designs and vLLM's classes do not.
    if phase_test == "known" and getattr(output, "step_kind", None) == "decode":
        return padded, "decode"
    num_prefills = 0
    for req_id, num_computed_tokens in _computed_before(output):
        request = requests[req_id]
        if is_prefill(
            num_computed_tokens, request.num_prompt_tokens, request.num_tokens, phase_test
        ):
            num_prefills += 1
            padded[req_id] = smallest_bucket(padded[req_id], buckets)
    if 0 < num_prefills < len(padded):
        raise RuntimeError(
            f"prefill and decode in one step: {num_prefills} of the {len(padded)} requests in "
            f"{output.num_scheduled_tokens} are in their prefill phase"
        )
    return padded, "empty" if not padded else "prefill" if num_prefills else "decode"


def _computed_before(output: SchedulerOutput) -> Iterator[tuple[str, int]]:
    """Each scheduled request with the tokens it had computed before the step."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens
    cached = output.scheduled_cached_reqs
    yield from zip(cached.req_ids, cached.num_computed_tokens, strict=True)
