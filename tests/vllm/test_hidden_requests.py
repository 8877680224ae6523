"""What vLLM's own scheduler reads of its queues while the Neuron rules hide most of them."""

from typing import Any, Literal

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from segattn.benchmarks.scheduler import vllm_reference
from segattn.benchmarks.scheduler.vllm_reference import make_real_request, make_real_scheduler
from segattn.scheduler import NeuronPolicy, SchedulerConfig
from segattn.scheduler.decode_node import DecodeNode
from segattn.scheduler.vllm_answers import RELEASE
from segattn.tests.vllm.recorder import Recorder
from segattn.tests.vllm.test_plugin import GENEROUS

KvAdmission = Literal["shared", "reserved", "worst_case"]
BOTH_KINDS = pytest.mark.parametrize("kind", ["neuron", "neuron_async"])


def _recorder(kind: str = "neuron", **config: Any) -> Recorder:
    policy = NeuronPolicy() if kind.startswith("neuron") else None
    return Recorder(kind, GENEROUS | config, policy)


def _step(scheduler: Any, arrived: set[str] | None = None, *, throttle: bool = False) -> Any:
    """One step with token 9 for whoever samples; `arrived` are requests whose K and V came."""
    output = scheduler.schedule(throttle)
    model_output = _sampled(scheduler, output)
    if arrived is not None:
        model_output.kv_connector_output = KVConnectorOutput(finished_recving=arrived)
    scheduler.update_from_output(output, model_output)
    return output


def _sampled(scheduler: Any, output: Any) -> Any:
    ids = list(output.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
        sampled_token_ids=[[] if scheduler.requests[i].is_prefill_chunk else [9] for i in ids],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


@pytest.mark.parametrize("kind", ["base", "neuron", "neuron_async"])
@pytest.mark.parametrize("admission", ["shared", "reserved", "worst_case"])
@pytest.mark.parametrize(("watermark", "must_stay_free"), [(0.0, 0), (0.3, 9), (0.5, 16)])
def test_a_watermark_keeps_blocks_free_beside_hidden_decodes(
    kind: str, admission: KvAdmission, watermark: float, must_stay_free: int
) -> None:
    # 33 blocks, of which the watermark is a share; each request has 28 tokens in 7 blocks at last.
    config = {**GENEROUS, "max_model_len": 32, "num_blocks": 33, "watermark": watermark}
    recorder = Recorder(kind, config, None if kind == "base" else NeuronPolicy(admission))
    scheduler = recorder.scheduler
    recorder.add(id="first", prompt=[1] * 20, max_tokens=8, eos=None)
    _step(scheduler)
    for number in range(3):
        recorder.add(id=str(number), prompt=[number + 2] * 20, max_tokens=8, eos=None)
    fewest, pool = 32, scheduler.kv_cache_manager.block_pool
    for _ in range(100):
        if not scheduler.has_requests():
            break
        had_others = bool(scheduler.running)
        output = scheduler.schedule()
        # No step is lost to a request that the rules admit and vLLM refuses.
        assert output.num_scheduled_tokens or not scheduler.requests
        if output.scheduled_new_reqs and had_others:
            fewest = min(fewest, pool.get_num_free_blocks())
        scheduler.update_from_output(output, _sampled(scheduler, output))
    assert not scheduler.requests
    assert must_stay_free <= fewest < 32


@BOTH_KINDS
def test_blocks_that_requests_share_count_once_when_they_are_admitted(kind: str) -> None:
    # A stem of 960 tokens in 60 blocks; each request adds 16 + 8 tokens in 2 blocks of its own.
    most = {}
    for admission in ("shared", "reserved"):
        config = {**GENEROUS, "block_size": 16, "max_model_len": 1024, "num_blocks": 81}
        config |= {"max_num_batched_tokens": 1024, "max_num_seqs": 8}
        recorder = Recorder(kind, config, NeuronPolicy(admission))
        scheduler = recorder.scheduler
        for number in range(8):
            prompt = [5] * 960 + [number + 10] * 16
            recorder.add(id=str(number), prompt=prompt, max_tokens=8, eos=None)
        most[admission] = 0
        for _ in range(100):
            if scheduler.has_requests():
                _step(scheduler)
                most[admission] = max(most[admission], len(scheduler.running))
        assert not scheduler.requests
    # 80 usable blocks: 60 + 8 * 2, or once 62.
    assert most == {"shared": 8, "reserved": 1}


@BOTH_KINDS
def test_prefills_are_not_throttled_while_requests_are_left_waiting(kind: str) -> None:
    recorder = _recorder(kind, max_num_seqs=16)
    scheduler = recorder.scheduler
    recorder.add(id="d", prompt=[1] * 8, max_tokens=60, eos=None)
    _step(scheduler)
    # With the first prompt as many prefills as may follow each other.
    for number in range(3):
        recorder.add(id=str(number), prompt=[number + 2] * 8, max_tokens=30, eos=None)
    steps = [dict(_step(scheduler).num_scheduled_tokens)]
    steps += [dict(_step(scheduler, throttle=True).num_scheduled_tokens) for _ in range(3)]
    # The first step left two waiting, so the guard lets prefills go on until none is left.
    assert [next(iter(step)) for step in steps if 8 in step.values()] == ["0", "1", "2"]
    recorder.add(id="late", prompt=[9] * 8, max_tokens=30, eos=None)
    assert "late" not in _step(scheduler, throttle=True).num_scheduled_tokens


@pytest.mark.parametrize("kind", ["base", "neuron"])
def test_a_stream_that_waits_for_input_holds_its_seat_as_in_this_release(kind: str) -> None:
    recorder = _recorder(kind, max_num_seqs=2)
    scheduler, config = recorder.scheduler, recorder.config
    stream = {"id": "S", "prompt": [5] * 4, "max_tokens": 1}
    scheduler.add_request(make_real_request(stream, config, resumable=True))
    for _ in range(2):
        _step(scheduler)
    assert scheduler.num_waiting_for_streaming_input == 1
    for name in "AB":
        recorder.add(id=name, prompt=[6] * 4, max_tokens=20, eos=None)
        for _ in range(3):
            _step(scheduler)
    running = [request.request_id for request in scheduler.running]
    assert running == (["A"] if RELEASE >= (0, 25) else ["A", "B"])


class _RemotePrefill(KVConnectorBase_V1):  # type: ignore[misc]  # vLLM is untyped here
    """Loads the K and V of whole prompts, while steps go on, for requests that it knows."""

    def __init__(self, known: set[str], kv_cache_config: Any) -> None:
        # Not the base's, which needs a whole engine.
        self.known = known
        self._kv_cache_config = kv_cache_config

    def __getattr__(self, name: str) -> Any:
        if name in ("requires_kv_delivery", "prefer_cross_layer_blocks"):
            return False
        return lambda *_, **__: None

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        if request.request_id not in self.known:
            return 0, False
        return request.num_prompt_tokens - num_computed_tokens, True

    def update_state_after_alloc(self, *_: Any, **__: Any) -> None:
        return

    def build_connector_meta(self, _: Any) -> None:
        return

    def start_load_kv(self, *_: Any, **__: Any) -> None:
        return

    def wait_for_layer_load(self, _: str) -> None:
        return

    def save_kv_layer(self, *_: Any, **__: Any) -> None:
        return

    def wait_for_save(self) -> None:
        return


def _decode_node(kind: str, known: set[str]) -> tuple[Recorder, Any]:
    recorder = _recorder(kind)
    scheduler = recorder.scheduler
    scheduler.connector = _RemotePrefill(known, scheduler.kv_cache_config)
    scheduler.answers.decode_node = DecodeNode(scheduler.connector)
    recorder.add(id="A", prompt=[5] * 4, max_tokens=20, eos=None)
    _step(scheduler)
    given = {"id": "R", "prompt": [6] * 9, "max_tokens": 5, "eos": None}
    request = make_real_request(given, recorder.config)
    request.kv_transfer_params = {"do_remote_prefill": True}
    scheduler.add_request(request)
    return recorder, scheduler


@BOTH_KINDS
def test_a_request_whose_prompt_was_computed_elsewhere_costs_no_decode_step(kind: str) -> None:
    _, scheduler = _decode_node(kind, {"R"})
    steps = []
    for number in range(5):
        output = _step(scheduler, {"R"} if number == 1 else None)
        steps.append(dict(output.num_scheduled_tokens))
        assert output.num_scheduled_tokens_padded == steps[-1]
        assert output.step_kind == "decode"
    assert scheduler.requests["R"].status == RequestStatus.RUNNING
    # It arrives, its K and V come, the last token of its prompt is a row of the batch.
    assert steps == [{"A": 1}, {"A": 1}, {"A": 1, "R": 1}, {"A": 1, "R": 1}, {"A": 1, "R": 1}]


@BOTH_KINDS
def test_a_prompt_that_turns_out_to_be_nowhere_is_a_prefill_of_its_own(kind: str) -> None:
    _, scheduler = _decode_node(kind, set())
    steps = [dict(_step(scheduler).num_scheduled_tokens) for _ in range(3)]
    assert steps == [{"A": 1}, {"R": 9}, {"A": 1, "R": 1}]


@pytest.mark.parametrize(
    ("kind", "is_async", "fitting"),
    [("neuron", True, "NeuronAsyncScheduler"), ("neuron_async", False, "NeuronScheduler")],
)
def test_a_class_that_does_not_fit_the_engines_loop_is_refused(
    kind: str, is_async: bool, fitting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits: type[Any] = vllm_reference.KINDS[kind]

    class Unfit(fits):  # type: ignore[misc]  # chosen at run time
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs["vllm_config"].scheduler_config.async_scheduling = is_async
            super().__init__(*args, **kwargs)

    monkeypatch.setitem(vllm_reference.KINDS, kind, Unfit)
    expected = f"async_scheduling={is_async}: must be {not is_async} for Unfit; or use {fitting}$"
    with pytest.raises(ValueError, match=expected):
        make_real_scheduler(kind, SchedulerConfig(**GENEROUS))


def test_a_count_of_drafts_that_follows_the_batch_is_refused() -> None:
    scheduler = _recorder().scheduler
    scheduler.dynamic_sd_lookup = [0, 3, 1]
    with pytest.raises(ValueError, match="num_speculative_tokens_per_batch_size: must be unset"):
        scheduler._check_settings()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_batched_tokens_bucket": [64]}, "'num_batched_tokens_bucket' is unknown"),
        ({"neuronpolicy": {}}, "'neuronpolicy' is unknown"),
        ({"neuron_policy": {"max_consecutive_prefill": 2}}, "'max_consecutive_prefill' is unknown"),
        ({"neuron_policy": {"anything": 2}}, "neuron_config.neuron_policy: 'anything' is unknown"),
        ({"num_batched_tokens_buckets": [32]}, "end in 64"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_reference, "_neuron_config", lambda *_: options)
    with pytest.raises(ValueError, match=message):
        make_real_scheduler("neuron", SchedulerConfig(**GENEROUS))


def test_options_of_other_owners_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"kv_segment_size_buckets": [512], "decode_context_length_buckets": [1024]}
    monkeypatch.setattr(vllm_reference, "_neuron_config", lambda *_: options)
    scheduler = make_real_scheduler("neuron", SchedulerConfig(**GENEROUS))
    assert scheduler.neuron_policy == NeuronPolicy()
