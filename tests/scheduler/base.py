"""Base schedulers for tests by hand: generous limits, blocks of 4 tokens."""

from typing import Any

from segattn.scheduler import (
    EngineCoreOutput,
    ModelRunnerOutput,
    Request,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
)


def make(kind: type[Scheduler] = Scheduler, **change: Any) -> Scheduler:
    given: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "block_size": 4,
        "num_blocks": 33,
    }
    return kind(SchedulerConfig(**given | change))


def add(scheduler: Scheduler, name: str, prompt: int | list[int], **more: Any) -> Request:
    """Add a request; a prompt given as a length has tokens that no other request has."""
    if isinstance(prompt, int):
        prompt = [1000 * ord(name[0]) + position for position in range(prompt)]
    request = Request(name, prompt, **({"max_tokens": 16} | more))
    scheduler.add_request(request)
    return request


def update(
    scheduler: Scheduler, output: SchedulerOutput, **tokens: int | list[int]
) -> list[EngineCoreOutput]:
    """Deliver the step; requests without tokens here got none."""
    given = [tokens.get(name, []) for name in output.num_scheduled_tokens]
    sampled = [[value] if isinstance(value, int) else value for value in given]
    outputs = scheduler.update_from_output(
        output, ModelRunnerOutput(list(output.num_scheduled_tokens), sampled)
    )
    scheduler.check_integrity()
    return outputs


def names(requests: Any) -> list[str]:
    return [request.request_id for request in requests]
