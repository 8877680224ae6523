"""Make a failing run small: fewer events, shorter prompts, plainer configuration.

Works on the inputs alone and runs everything again for every attempt, so it takes seconds.
"""

from collections.abc import Iterator
from typing import Any

from .. import NeuronPolicy, SchedulerConfig
from .trace import Event
from .trial import Finding, failure_of

REQUIRED = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "block_size",
    "num_blocks",
)
"""Fields of a configuration that have no default."""

Setup = tuple[dict[str, Any], dict[str, Any], list[Event]]
"""Configuration, policy, events."""


class NotReproducedError(ValueError):
    """A run that failed keeps all rules when it is run again."""


def shrink(finding: Finding) -> Finding:
    """The smallest run that removing and simplifying finds and that fails with the same exception.

    NotReproducedError if it does not fail when it is run again.
    """
    found = failure_of(
        finding.subject, finding.config, finding.policy, finding.events, finding.rules
    )
    if found is None:
        raise NotReproducedError(
            "finding: must fail to be shrunk, but it keeps all rules when run again"
        )
    improved = True
    while improved:
        improved = False
        for config, policy, events in simplifications(found):
            if not _is_valid(config, policy):
                continue
            smaller = failure_of(found.subject, config, policy, events, found.rules)
            # Another kind of failure is another finding.
            same = smaller is not None and type(smaller.error) is type(found.error)
            if smaller is not None and same and _size(smaller) < _size(found):
                found, improved = smaller, True
                break
    return found


def _is_valid(config: dict[str, Any], policy: dict[str, Any]) -> bool:
    try:
        SchedulerConfig(**config)
        NeuronPolicy(**policy)
    except ValueError:
        return False
    return True


def _size(finding: Finding) -> tuple[int, int, int]:
    """Events, what their requests ask for, fields that are set."""
    asked = [event[1] for event in finding.events if event[0] == "add"]
    tokens = sum(len(r) + len(r["prompt"]) + r["max_tokens"] for r in asked)
    named = sum(len(event[1]) for event in finding.events if event[0] == "abort")
    return len(finding.events), tokens + named, len(finding.config) + len(finding.policy)


def simplifications(finding: Finding) -> Iterator[Setup]:
    """Runs that are a little simpler, the boldest first."""
    config, policy, events = finding.config, finding.policy, finding.events
    size = len(events)
    while size:
        for start in range(0, len(events), size):
            yield config, policy, events[:start] + events[start + size :]
        size //= 2
    for index, event in enumerate(events):
        for simpler in _simpler_events(event):
            yield config, policy, [*events[:index], simpler, *events[index + 1 :]]
    for name in config.keys() - {*REQUIRED}:
        yield {key: value for key, value in config.items() if key != name}, policy, events
    for name in policy:
        yield config, {key: value for key, value in policy.items() if key != name}, events


def _simpler_events(event: Event) -> Iterator[Event]:
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
