"""A base scheduler that does not start a request which the Neuron rules admitted."""

import pytest

from segattn.scheduler import Admission, NeuronPolicy, PauseState, Scheduler
from segattn.tests.scheduler.engine import BOTH_LOOPS, neuron_engine, prompt
from segattn.tests.scheduler.test_atomicity import call_after_every_failure, sample


def refuse(*_: object) -> Admission:
    """The base may have reasons of its own, as vLLM's has: adapters, encoders, connectors."""
    return Admission.KV_BLOCKS


@BOTH_LOOPS
def test_decodes_have_a_turn_after_a_prefill_that_could_not_start(
    asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = neuron_engine(NeuronPolicy(), asynchronous=asynchronous)
    scheduler = engine.scheduler
    engine.add("a", prompt(4), 9)
    engine.step()
    engine.add("b", prompt(4, 100), 9)
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "_admit", refuse)
        steps = [engine.step() for _ in range(4)]
        assert steps == [{}, {"a": 1}, {}, {"a": 1}]
        assert scheduler.waiting_reasons() == {"b": Admission.DECODE_TURN}
    assert engine.step() == {"b": 4}


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_failure_while_what_could_not_start_is_put_back_changes_nothing(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = neuron_engine(NeuronPolicy(), policy=policy)
    engine.add("a", prompt(4), 9)
    engine.step()
    for name in "bc":
        engine.add(name, prompt(4, 100), 9)
    monkeypatch.setattr(Scheduler, "_admit", refuse)
    scheduler = engine.scheduler
    output, num_calls = call_after_every_failure(scheduler, scheduler.schedule)
    assert (output.num_scheduled_tokens, num_calls > 20) == ({}, True)
    assert scheduler.waiting_reasons() == {"b": Admission.KV_BLOCKS, "c": Admission.PREFILL_BATCH}
    output, _ = call_after_every_failure(scheduler, scheduler.schedule)
    assert output.num_scheduled_tokens == {"a": 1}
    scheduler.update_from_output(output, sample(scheduler, output))


def test_a_pause_is_no_reason_for_a_turn_of_the_decodes() -> None:
    engine = neuron_engine(NeuronPolicy(), max_num_batched_tokens=4)
    engine.add("a", prompt(4), 9)
    engine.step()
    engine.add("b", prompt(12, 100), 9)
    assert engine.step() == {"b": 4}
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert engine.step() == {}
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert engine.step() == {"b": 4}
