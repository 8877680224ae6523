"""A step of a request that was aborted and whose id lives again gives the new one nothing."""

import pytest

from segattn.scheduler import (
    AsyncScheduler,
    ModelRunnerOutput,
    NeuronAsyncScheduler,
    NeuronScheduler,
    Request,
    RequestStatus,
    Scheduler,
    SchedulerConfig,
)

KINDS: list[type[Scheduler]] = [Scheduler, AsyncScheduler, NeuronScheduler, NeuronAsyncScheduler]


def deliver(scheduler: Scheduler, step: object, token: int) -> list[tuple[str, list[int]]]:
    assert step is scheduler.steps_in_flight[0].output
    names = list(scheduler.steps_in_flight[0].num_scheduled_tokens)
    result = ModelRunnerOutput(names, [[token] for _ in names])
    output = scheduler.steps_in_flight[0].output
    assert output is not None
    return [
        (out.request_id, out.new_token_ids) for out in scheduler.update_from_output(output, result)
    ]


@pytest.mark.parametrize(
    ("kind", "is_admitted"),
    [(kind, is_admitted) for kind in KINDS for is_admitted in {False, kind.is_async}],
)
def test_the_late_token_of_a_dead_request_is_dropped(
    kind: type[Scheduler], is_admitted: bool
) -> None:
    scheduler = kind(SchedulerConfig(4, 64, 64, 4, 40))
    scheduler.add_request(Request("again", [1, 2, 3, 4, 5], 4))
    late = scheduler.schedule()
    scheduler.finish_requests("again", RequestStatus.FINISHED_ABORTED)
    scheduler.add_request(Request("again", [9, 8, 7], 3))
    # The new one waits, or is in a step of its own behind the late one.
    own = scheduler.schedule() if is_admitted else None
    before = (
        scheduler.requests["again"].num_computed_tokens,
        scheduler.requests["again"].num_in_flight_tokens,
        scheduler.requests["again"].num_output_placeholders,
    )
    assert deliver(scheduler, late, 50) == []
    again = scheduler.requests["again"]
    assert again.output_token_ids == []
    assert before == (
        again.num_computed_tokens,
        again.num_in_flight_tokens,
        again.num_output_placeholders,
    )
    scheduler.check_integrity()
    assert deliver(scheduler, own or scheduler.schedule(), 60) == [("again", [60])]
    assert again.output_token_ids == [60]
    scheduler.check_integrity()


def test_a_synchronous_neuron_scheduler_decides_one_step_at_a_time() -> None:
    scheduler = NeuronScheduler(SchedulerConfig(4, 64, 64, 4, 40))
    scheduler.add_request(Request("a", [1, 2, 3], 4))
    step = scheduler.schedule()
    with pytest.raises(RuntimeError, match="1 step is in flight: use NeuronAsyncScheduler"):
        scheduler.schedule()
    assert deliver(scheduler, step, 5) == [("a", [5])]
    assert scheduler.schedule().num_scheduled_tokens == {"a": 1}
