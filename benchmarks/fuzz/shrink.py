"""Make a failing trace small: fewer events, shorter prompts, plainer configuration.

Works on the inputs alone and runs both sides again for every attempt, so it takes seconds.
"""

from collections.abc import Iterator
from typing import Any

from segattn.benchmarks.fuzz.compare import Comparison, Trace, rerun

REQUIRED = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "block_size",
    "num_blocks",
)
"""Fields of a configuration that have no default."""


def failure_of(trace: Trace) -> tuple[Trace, str] | None:
    """The trace as the model sees it up to the failing event, and how it fails; None if not."""
    run = Comparison(trace["kind"], trace["config"], trace["policy"])
    try:
        rerun(run, trace["events"])
    except Exception as error:  # any failure of the scheduler under test is the finding
        return run.trace, f"{type(error).__name__}: {error}"
    return None


def shrink(trace: Trace) -> tuple[Trace, str]:
    """The smallest failing trace that removing and simplifying finds, and how it fails.

    ValueError if `trace` does not fail.
    """
    found = failure_of(trace)
    if found is None:
        raise ValueError("trace: must fail to be shrunk, but both sides agree")
    improved = True
    while improved:
        improved = False
        for smaller in simplifications(found[0]):
            failure = failure_of(smaller)
            if failure is not None:
                found, improved = failure, True
                break
    return found


def simplifications(trace: Trace) -> Iterator[Trace]:
    """Traces that are a little simpler, the boldest first."""
    events = trace["events"]
    size = len(events) // 2
    while size:
        for start in range(0, len(events), size):
            yield trace | {"events": events[:start] + events[start + size :]}
        size //= 2
    for index, event in enumerate(events):
        for simpler in _simpler_events(event):
            yield trace | {"events": [*events[:index], simpler, *events[index + 1 :]]}
    for part in ("config", "policy"):
        for name in trace[part]:
            rest = {key: value for key, value in trace[part].items() if key != name}
            if part == "policy" or name not in REQUIRED:
                yield trace | {part: rest}


def _simpler_events(event: list[Any]) -> Iterator[list[Any]]:
    if event[0] == "abort" and len(event[1]) > 1:
        yield from (["abort", [name]] for name in event[1])
    if event[0] != "add":
        return
    request = event[1]
    for name in request.keys() - {"id", "prompt", "max_tokens", "arrival"}:
        yield ["add", {key: value for key, value in request.items() if key != name}]
    length = len(request["prompt"])
    for shorter in {length // 2, length - 1} - {0, length}:
        yield ["add", request | {"prompt": request["prompt"][:shorter]}]
    for fewer in {request["max_tokens"] // 2, request["max_tokens"] - 1} - {0}:
        if fewer < request["max_tokens"]:
            yield ["add", request | {"max_tokens": fewer}]
