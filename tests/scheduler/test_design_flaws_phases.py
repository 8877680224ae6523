"""Order, phases and state in the published design: flawed with `documented()`, not by default.

Configurations are the smallest that show the flaw.
"""

import pytest

from segattn.scheduler import (
    NeuronPolicy,
    NeuronScheduler,
    PauseState,
    RequestStatus,
    SchedulerState,
)
from segattn.scheduler.admission import Admission
from segattn.tests.scheduler.engine import BOTH_LOOPS, Engine, neuron, neuron_engine, prompt

DOCUMENTED = NeuronPolicy.documented()
DEFAULT = NeuronPolicy()
NeuronEngine = Engine[NeuronScheduler]


def test_running_keeps_the_order_of_admission_unless_documented() -> None:
    def running(policy: NeuronPolicy) -> list[str]:
        engine = neuron_engine(policy)
        for name in "ABCD":
            engine.add(name, prompt(2), 9)
        for _ in range(4):
            engine.step()
        return [request.request_id for request in engine.scheduler.running]

    assert running(DOCUMENTED) == ["D", "C", "B", "A"]
    assert running(DEFAULT) == ["A", "B", "C", "D"]


def test_a_budget_below_the_decodes_serves_the_oldest_first_unless_documented() -> None:
    def served(policy: NeuronPolicy) -> set[str]:
        engine = neuron_engine(policy, max_num_scheduled_tokens=2)
        for name in "ABCD":
            engine.add(name, prompt(2), 9)
        for _ in range(4):
            engine.step()
        return set(engine.step())

    assert served(DOCUMENTED) == {"D", "C"}
    assert served(DEFAULT) == {"A", "B"}


@BOTH_LOOPS
def test_a_pause_for_new_requests_lets_the_decodes_finish_unless_documented(
    asynchronous: bool,
) -> None:
    def run(policy: NeuronPolicy) -> tuple[NeuronEngine, list[dict[str, int]]]:
        engine = neuron_engine(policy, asynchronous=asynchronous, max_model_len=16)
        engine.add("A", prompt(4), 6)
        engine.step()
        engine.add("B", prompt(4, 50), 1)
        engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        return engine, [engine.step() for _ in range(12)]

    stuck, steps = run(DOCUMENTED)
    assert steps == [{}] * 12
    assert stuck.finish_reasons == {}

    engine, steps = run(DEFAULT)
    assert steps[:5] == [{"A": 1}] * 5
    assert engine.finish_reasons == {"A": "length"}
    assert [request.request_id for request in engine.scheduler.waiting] == ["B"]
    assert engine.scheduler.waiting_reasons() == {"B": Admission.PAUSED}
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run(5)
    assert engine.finish_reasons["B"] == "length"


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_an_exception_of_the_base_loses_no_hidden_request(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError("injected")

    def queues_after_failure(
        neuron_policy: NeuronPolicy,
    ) -> tuple[list[str], list[str], dict[str, int]]:
        engine = neuron_engine(neuron_policy, policy=policy)
        for name in "AB":
            engine.add(name, prompt(2), 9)
            engine.step()
        for name in "CD":
            engine.add(name, prompt(3), 9)
        with monkeypatch.context() as patch:
            patch.setattr(engine.scheduler.kv_cache_manager, "allocate_slots", fail)
            with pytest.raises(MemoryError):
                engine.scheduler.schedule()
        scheduler = engine.scheduler
        running = [request.request_id for request in scheduler.running]
        waiting = [request.request_id for request in scheduler.waiting]
        return running, waiting, scheduler.schedule().num_scheduled_tokens

    # The design document loses them; there is no decision in that to compare with.
    assert queues_after_failure(DOCUMENTED) == (["B", "A"], ["C", "D"], {"C": 3})
    assert queues_after_failure(DEFAULT) == (["A", "B"], ["C", "D"], {"C": 3})


def test_recomputed_outputs_are_prefill_unless_documented() -> None:
    def steps_after_reset(policy: NeuronPolicy) -> list[tuple[dict[str, int], SchedulerState]]:
        engine = neuron_engine(
            policy, max_num_batched_tokens=4, max_num_seqs=2, enable_prefix_caching=False
        )
        for name in "AB":
            engine.add(name, prompt(4), 20)
            engine.step()
        for _ in range(4):
            engine.step()
        # Both have 4 + 5 known tokens now, of which 8 have to be recomputed before the next decode.
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        steps = []
        for _ in range(5):
            output = engine.schedule()
            assert output.num_scheduled_tokens_padded is not None
            steps.append((output.num_scheduled_tokens_padded, engine.scheduler.state))
            engine.deliver()
        return steps

    decode, prefill = SchedulerState.ACTIVE_DECODE, SchedulerState.ACTIVE_PREFILL
    assert steps_after_reset(DOCUMENTED)[:4] == [
        ({"B": 4}, prefill),
        ({"A": 4}, prefill),
        ({"A": 4}, decode),
        ({"A": 1, "B": 3}, decode),
    ]
    assert steps_after_reset(DEFAULT) == [
        ({"A": 4}, prefill),
        ({"A": 4}, prefill),
        ({"B": 4}, prefill),
        ({"B": 4}, prefill),
        ({"A": 1, "B": 1}, decode),
    ]


def test_a_token_of_a_resume_is_padded_like_a_prefill_by_default() -> None:
    engine = neuron_engine(DEFAULT, max_num_batched_tokens=8, enable_prefix_caching=False)
    engine.add("A", prompt(6), 20)
    for _ in range(4):
        engine.step()
    assert engine.scheduler.requests["A"].num_tokens == 10
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert engine.step() == {"A": 8}
    output = engine.schedule()
    assert output.num_scheduled_tokens == {"A": 2}
    assert output.num_scheduled_tokens_padded == {"A": 8}
    assert engine.scheduler.state is SchedulerState.ACTIVE_PREFILL


def test_state_follows_the_queues_after_an_empty_step_unless_documented() -> None:
    def states(policy: NeuronPolicy) -> list[SchedulerState]:
        # max_num_seqs 1 and one step in flight: nothing to schedule while the last token is out.
        engine = neuron_engine(policy, asynchronous=True, max_num_seqs=1)
        engine.add("A", prompt(4), 1)
        engine.add("B", prompt(4, 50), 1)
        seen = []
        for _ in range(2):
            engine.schedule()
            seen.append(engine.scheduler.state)
        engine.drain()
        seen.append(engine.scheduler.state)
        engine.run(9)
        seen.append(engine.scheduler.state)
        engine.add("C", prompt(4, 50), 1)
        engine.scheduler.finish_requests("C", RequestStatus.FINISHED_ABORTED)
        return [*seen, engine.scheduler.state]

    idle, decode, prefill = (
        SchedulerState.IDLE,
        SchedulerState.ACTIVE_DECODE,
        SchedulerState.ACTIVE_PREFILL,
    )
    assert states(DOCUMENTED)[:2] == [prefill, prefill]
    assert states(DEFAULT) == [prefill, decode, decode, idle, idle]


def test_empty_queues_are_idle_at_once_unless_documented() -> None:
    def state_after_the_last_token(policy: NeuronPolicy) -> SchedulerState:
        engine = neuron_engine(policy)
        engine.add("A", prompt(4), 2)
        engine.step()
        engine.step()
        assert engine.finish_reasons == {"A": "length"}
        return engine.scheduler.state

    assert state_after_the_last_token(DOCUMENTED) is SchedulerState.ACTIVE_DECODE
    assert state_after_the_last_token(DEFAULT) is SchedulerState.IDLE


@pytest.mark.parametrize(
    ("budget", "buckets"), [(5000, (128, 256, 512, 1024, 2048, 4096, 5000)), (100, (100,))]
)
def test_default_buckets_end_in_the_largest_chunk(budget: int, buckets: tuple[int, ...]) -> None:
    # The design's builder ends at 4096 for 5000 and is empty for 100, against its own rule for the
    # last bucket.
    scheduler = neuron(max_num_batched_tokens=budget, max_model_len=8000)
    assert scheduler.rules.prefill_buckets == buckets


def test_one_phase_per_step_is_verified_even_if_the_base_mixes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = neuron_engine(DEFAULT)
    engine.add("A", prompt(4), 9)
    engine.step()
    engine.add("B", prompt(4, 50), 9)
    before = engine.scheduler.num_free_blocks
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler.rules, "_separate_phases", lambda: None)
        with pytest.raises(RuntimeError, match="prefill and decode in one step"):
            engine.scheduler.schedule()
    assert [request.request_id for request in engine.scheduler.running] == ["A"]
    assert [request.request_id for request in engine.scheduler.waiting] == ["B"]
    assert engine.scheduler.num_free_blocks == before
    engine.run(40)
    assert engine.finish_reasons == {"A": "length", "B": "length"}
