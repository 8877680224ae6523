"""A base scheduler that does not start a request which the Neuron rules admitted."""

import pytest

from segattn.scheduler import Admission, NeuronPolicy, PauseState, stepping
from segattn.tests.scheduler.engine import BOTH_LOOPS, neuron_engine, prompt


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
        patch.setattr(stepping, "_admit", refuse)
        steps = [engine.step() for _ in range(4)]
        assert steps == [{}, {"a": 1}, {}, {"a": 1}]
        assert scheduler.waiting_reasons() == {"b": Admission.DECODE_TURN}
    assert engine.step() == {"b": 4}


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
