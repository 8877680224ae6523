"""The Neuron rules over the real classes of whichever vLLM release is installed (0.24 to 0.33)."""

from collections.abc import Callable
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from vllm.v1.request import RequestStatus

from segattn.benchmarks.scheduler.vllm_reference import make_real_request, make_real_scheduler
from segattn.reference.paging import smallest_bucket
from segattn.scheduler import NeuronPolicy, SchedulerConfig
from segattn.scheduler.admission import Admission
from segattn.tests.vllm.recorder import Recorder
from segattn.tests.vllm.workload import Workload, play, workloads

DOCUMENTED = NeuronPolicy.documented()
DEFAULT = NeuronPolicy()
POLICIES = [
    DEFAULT,
    NeuronPolicy(kv_admission="reserved"),
    NeuronPolicy(max_consecutive_prefills=1),
]
BOTH_KINDS = pytest.mark.parametrize("kind", ["neuron", "neuron_async"])
GENEROUS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_model_len": 64,
    "block_size": 4,
    "num_blocks": 200,
}


def _recorder(policy: NeuronPolicy = DEFAULT, kind: str = "neuron", **config: Any) -> Recorder:
    return Recorder(kind, GENEROUS | config, policy)


def _step(recorder: Recorder, token: int = 9) -> dict[str, int]:
    output = recorder.schedule()
    requests = recorder.scheduler.requests
    sampled = [
        [request_id, [] if requests[request_id].is_prefill_chunk else [token]]
        for request_id in output.num_scheduled_tokens
    ]
    recorder.launch(output, sampled)
    recorder.update()
    return dict(output.num_scheduled_tokens)


@BOTH_KINDS
@pytest.mark.parametrize("policy", POLICIES, ids=["worst case", "reserved", "decode turns"])
def test_each_step_has_one_phase_and_everything_finishes(kind: str, policy: NeuronPolicy) -> None:
    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(workload=workloads(kind.endswith("async")))
    def run(workload: Workload) -> None:
        recorder = Recorder(kind, workload.config, policy)
        assume(_vllm_itself_works(recorder))
        play(recorder, workload, 2 if kind.endswith("async") else 1, max_final_steps=3000)
        assert recorder.scheduler.get_num_unfinished_requests() == 0
        queued = [len(recorder.scheduler.running), len(recorder.scheduler.waiting)]
        assert queued == [0, 0]
        reset: set[str] = set()
        for name, *rest in recorder.events:
            if name == "reset" and rest[0]:
                reset |= set(rest[2]["waiting"])
            elif name == "schedule":
                _check_step(rest[1], recorder.config.prefill_buckets)
                # From 0.32 on the step after a reset names those that the reset preempted.
                assert set(rest[1]["pre"]) <= reset
                reset = set()

    run()


def _vllm_itself_works(recorder: Recorder) -> bool:
    """Whether vLLM's own scheduler serves every workload with this configuration."""
    if not hasattr(recorder.scheduler, "kv_holding_waiting"):
        return True
    num_padded = 1 + recorder.config.num_speculative_tokens
    is_cut = 0 < recorder.config.long_prefill_token_threshold < num_padded
    return recorder.config.step_token_budget >= num_padded and not is_cut


@pytest.mark.parametrize("kind", ["base", "async"])
def test_vllm_itself_never_admits_a_row_of_drafts_beyond_the_budget(kind: str) -> None:
    # From 0.32 on it pads a waiting request with one token left to 1 + drafts tokens.
    def play_two(**config: int) -> Recorder:
        recorder = Recorder(kind, GENEROUS | {"num_speculative_tokens": 2} | config)
        recorder.add(id="A", prompt=[5, 6, 7, 8, 9], max_tokens=4, eos=None)
        for _ in range(3):
            _step(recorder)
        # Four of its five tokens are cached.
        recorder.add(id="B", prompt=[5, 6, 7, 8, 9], max_tokens=4, eos=None)
        for _ in range(9):
            _step(recorder)
        return recorder

    if not hasattr(Recorder(kind, GENEROUS).scheduler, "kv_holding_waiting"):
        assert not play_two(max_num_scheduled_tokens=2).scheduler.requests
        return
    assert list(play_two(max_num_scheduled_tokens=2).scheduler.requests) == ["B"]
    assert not play_two(max_num_scheduled_tokens=3).scheduler.requests


def _check_step(step: dict[str, Any], buckets: tuple[int, ...]) -> None:
    padded, counts = dict(step["pad"]), dict(step["nst"])
    if step["state"] == "ACTIVE_PREFILL" and counts:
        assert len(counts) == 1
        (count,) = counts.values()
        assert list(padded.values()) == [smallest_bucket(count, buckets)]
    else:
        assert padded == counts
        assert step["new"] == []


def test_options_come_from_additional_config() -> None:
    config = SchedulerConfig(
        **GENEROUS, num_batched_tokens_buckets=[16, 64], num_seqs_buckets=[2, 4]
    )
    policy = NeuronPolicy(max_consecutive_prefills=3, kv_admission="reserved")
    scheduler = make_real_scheduler("neuron", config, policy)
    assert scheduler.rules.prefill_buckets == (16, 64)
    assert scheduler.decode_buckets == [2, 4]
    assert asdict(scheduler.neuron_policy) == asdict(policy)
    # 199 usable blocks, 16 for a request of 64 tokens.
    assert scheduler.max_kv_concurrent == 12
    unnamed = make_real_scheduler("neuron", SchedulerConfig(**GENEROUS))
    assert unnamed.neuron_policy == NeuronPolicy()
    assert unnamed.rules.prefill_buckets == (64,)


def test_a_request_that_never_fits_ends_with_an_error_and_the_engine_goes_on() -> None:
    recorder = _recorder(num_blocks=5, max_model_len=20)
    scheduler, config = recorder.scheduler, recorder.config
    too_large = make_real_request({"id": "A", "prompt": [7] * 17, "max_tokens": 1}, config)
    scheduler.add_request(too_large)
    assert too_large.status == RequestStatus.FINISHED_ERROR
    assert scheduler.has_requests()
    output = scheduler.schedule()
    recorder.launch(output, [])
    _, output, _ = recorder.in_flight.popleft()
    assert output.total_num_scheduled_tokens == 0
    outputs = scheduler.update_from_output(output, _empty_model_output())
    (refusal,) = outputs[0].outputs
    assert (refusal.request_id, str(refusal.finish_reason)) == ("A", "error")
    assert "needs 5 KV blocks, the cache has 4" in refusal.stop_reason
    assert not scheduler.has_requests()
    recorder.add(id="B", prompt=[7] * 16, max_tokens=1)
    assert _step(recorder) == {"B": 16}


def _empty_model_output() -> Any:
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

    return EMPTY_MODEL_RUNNER_OUTPUT


def _a_streaming_request_continues(recorder: Recorder) -> None:
    """Let a stream wait for its next input while A decodes, then hand the input in."""
    scheduler, config = recorder.scheduler, recorder.config
    chunk = {"id": "S", "prompt": [5] * 4, "max_tokens": 1, "eos": None}
    scheduler.add_request(make_real_request(chunk, config, resumable=True))
    assert _step(recorder) == {"S": 4}
    recorder.add(id="A", prompt=[6] * 4, max_tokens=20, eos=None)
    assert _step(recorder) == {"A": 4}
    assert _step(recorder) == {"A": 1}
    scheduler.add_request(make_real_request(chunk, config, resumable=True))


def _a_grammar_becomes_ready(recorder: Recorder) -> None:
    """Let a request wait for its grammar while A decodes, then finish the grammar."""
    scheduler, config = recorder.scheduler, recorder.config
    scheduler.structured_output_manager = SimpleNamespace(
        should_advance=lambda *_, **__: False, accept_tokens=lambda *_, **__: True
    )
    request = make_real_request({"id": "S", "prompt": [5] * 4, "max_tokens": 3}, config)
    request.structured_output_request = SimpleNamespace(grammar=None)
    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    recorder.add(id="A", prompt=[6] * 4, max_tokens=20, eos=None)
    assert _step(recorder) == {"A": 4}
    scheduler.add_request(request)
    assert _step(recorder) == {"A": 1}
    if not scheduler.neuron_policy.is_literal:
        assert scheduler.waiting_reasons() == {"S": Admission.BLOCKED}
    request.structured_output_request = SimpleNamespace(grammar=object())


@pytest.mark.parametrize("prepare", [_a_streaming_request_continues, _a_grammar_becomes_ready])
def test_a_request_that_waited_elsewhere_is_held_back_like_others(
    prepare: Callable[[Recorder], None],
) -> None:
    recorder = _recorder()
    prepare(recorder)
    step = _step(recorder)
    assert set(step) == {"S"}
    assert set(_step(recorder)) <= {"A", "S"}
    assert "S" in recorder.scheduler.requests


@pytest.mark.parametrize("kind", ["neuron", "neuron_async"])
def test_an_exception_of_vllm_loses_no_hidden_request(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError("injected")

    def queues_after_failure(policy: NeuronPolicy) -> tuple[list[str], list[str]]:
        recorder = _recorder(policy, kind)
        for name in "AB":
            recorder.add(id=name, prompt=[5] * 3, max_tokens=9, eos=None)
            _step(recorder)
        for name in "CD":
            recorder.add(id=name, prompt=[6] * 3, max_tokens=9, eos=None)
        scheduler = recorder.scheduler
        with monkeypatch.context() as patch:
            patch.setattr(scheduler.kv_cache_manager, "allocate_slots", fail)
            with pytest.raises(MemoryError):
                scheduler.schedule()
        return [r.request_id for r in scheduler.running], [r.request_id for r in scheduler.waiting]

    assert queues_after_failure(DOCUMENTED) == (["B", "A"], ["C", "D"])
    assert queues_after_failure(DEFAULT) == (["A", "B"], ["C", "D"])


def test_throttled_prefills_wait_while_something_decodes() -> None:
    recorder = _recorder()
    recorder.add(id="A", prompt=[5] * 4, max_tokens=9, eos=None)
    _step(recorder)
    recorder.add(id="B", prompt=[6] * 4, max_tokens=9, eos=None)
    recorder.scheduler.prefill_capacity_bound = False
    output = recorder.scheduler.schedule(True)
    assert dict(output.num_scheduled_tokens) == {"A": 1}
    assert recorder.scheduler.waiting_reasons() == {"B": Admission.DECODE_TURN}


def test_a_prefill_that_vllm_does_not_schedule_waits_for_a_reason_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = _recorder()
    recorder.add(id="A", prompt=[5] * 4, max_tokens=9, eos=None)
    scheduler = recorder.scheduler
    with monkeypatch.context() as patch:
        patch.setattr(scheduler.kv_cache_manager, "allocate_slots", lambda *_, **__: None)
        assert _step(recorder) == {}
    assert scheduler.waiting_reasons() == {"A": Admission.NOT_SCHEDULED}
    assert scheduler.admission_counts[Admission.NOT_SCHEDULED] == 1
    assert _step(recorder) == {"A": 4}
    assert scheduler.waiting_reasons() == {}


def test_requests_are_counted_with_the_hidden_ones_during_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = _recorder()
    recorder.add(id="A", prompt=[5] * 4, max_tokens=9, eos=None)
    _step(recorder)
    recorder.add(id="B", prompt=[6] * 4, max_tokens=9, eos=None)
    recorder.add(id="C", prompt=[6] * 4, max_tokens=9, eos=None)
    scheduler = recorder.scheduler
    seen = []
    allocate_slots = scheduler.kv_cache_manager.allocate_slots

    def note(*args: Any, **kwargs: Any) -> Any:
        seen.append(scheduler.get_request_counts())
        return allocate_slots(*args, **kwargs)

    monkeypatch.setattr(scheduler.kv_cache_manager, "allocate_slots", note)
    assert _step(recorder) == {"B": 4}
    assert seen == [(1, 2)]
    assert scheduler.get_request_counts() == (2, 1)


def test_adapters_beyond_the_limit_of_a_decode_batch_are_not_admitted() -> None:
    recorder = _recorder()
    scheduler, config = recorder.scheduler, recorder.config
    scheduler.lora_config = SimpleNamespace(max_loras=1)
    for number, name in enumerate("AB"):
        adapter = SimpleNamespace(lora_int_id=1 + number, lora_name=name, lora_path=name)
        given = {"id": name, "prompt": [5 + number] * 4, "max_tokens": 3, "eos": None}
        scheduler.add_request(make_real_request(given, config, lora_request=adapter))
    assert [_step(recorder) for _ in range(2)] == [{"A": 4}, {"A": 1}]
    assert scheduler.waiting_reasons() == {"B": Admission.BLOCKED}
    assert [_step(recorder) for _ in range(2)] == [{"A": 1}, {"B": 4}]
