"""Throttled prefills: vLLM's balancing between data-parallel engines, worked out by hand."""

import pytest

from segattn.scheduler import Admission, Scheduler
from segattn.tests.scheduler.base import add, make, update
from segattn.tests.scheduler.engine import neuron


def with_a_decode() -> Scheduler:
    """A budget of 8 tokens, and "a" that decodes."""
    scheduler = make(max_num_batched_tokens=8)
    add(scheduler, "a", 3)
    update(scheduler, scheduler.schedule(), a=1)
    return scheduler


def test_a_waiting_prompt_is_put_off_while_something_decodes() -> None:
    scheduler = with_a_decode()
    add(scheduler, "b", 3)
    output = scheduler.schedule(True)
    assert output.num_scheduled_tokens == {"a": 1}
    assert scheduler.waiting_reasons() == {"b": Admission.THROTTLED}
    assert scheduler.schedule(False).num_scheduled_tokens == {"b": 3}


def test_a_prompt_in_chunks_is_put_off_too() -> None:
    scheduler = with_a_decode()
    add(scheduler, "b", 12)
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 1, "b": 7}
    update(scheduler, output, a=2)
    output = scheduler.schedule(True)
    assert output.num_scheduled_tokens == {"a": 1}
    update(scheduler, output, a=3)
    assert scheduler.schedule(False).num_scheduled_tokens == {"a": 1, "b": 5}


def test_nothing_is_put_off_while_nothing_decodes() -> None:
    scheduler = make(max_num_batched_tokens=8)
    add(scheduler, "a", 12)
    add(scheduler, "b", 3)
    output = scheduler.schedule(True)
    assert output.num_scheduled_tokens == {"a": 8}
    update(scheduler, output)
    assert scheduler.schedule(True).num_scheduled_tokens == {"a": 4, "b": 3}


def test_prompts_are_not_put_off_when_admissions_ended_with_requests_waiting() -> None:
    scheduler = with_a_decode()
    add(scheduler, "b", 7)
    add(scheduler, "c", 3)
    output = scheduler.schedule(False)
    assert output.num_scheduled_tokens == {"a": 1, "b": 7}
    update(scheduler, output, a=2, b=1)
    # "c" was left over, so the engine has no capacity to spare and goes on with prefills.
    output = scheduler.schedule(True)
    assert output.num_scheduled_tokens == {"a": 1, "b": 1, "c": 3}
    update(scheduler, output, a=3, b=2, c=1)
    # Now the queue was emptied.
    add(scheduler, "d", 3)
    assert scheduler.schedule(True).num_scheduled_tokens == {"a": 1, "b": 1, "c": 1}


def test_a_step_that_puts_prefills_off_says_nothing_of_the_capacity() -> None:
    scheduler = with_a_decode()
    add(scheduler, "b", 3)
    for token in (2, 3):  # "b" is left waiting by choice, so the second step puts it off again
        output = scheduler.schedule(True)
        assert output.num_scheduled_tokens == {"a": 1}
        update(scheduler, output, a=token)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_neuron_kinds_give_a_throttled_step_to_the_decodes(asynchronous: bool) -> None:
    scheduler = neuron(asynchronous=asynchronous)
    add(scheduler, "a", 3)
    update(scheduler, scheduler.schedule(), a=1)
    add(scheduler, "b", 3)
    throttled = scheduler.schedule(True)
    assert throttled.num_scheduled_tokens == {"a": 1}
    assert scheduler.waiting_reasons() == {"b": Admission.DECODE_TURN}
    update(scheduler, throttled, a=1)
    assert scheduler.schedule(False).num_scheduled_tokens == {"b": 3}
