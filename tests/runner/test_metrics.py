"""Metrics of padding and load under the names that vLLM Neuron and vLLM use."""

from segattn.runner.metrics import EngineMetrics
from segattn.tests.runner.steps import DECODE, step


def sample(metrics: EngineMetrics, name: str, **labels: str) -> float | None:
    """Value of one time series."""
    return metrics.registry.get_sample_value(name, {"model_name": "m"} | labels)


def test_padding_is_counted_by_graph_in_tokens_and_in_sequences() -> None:
    metrics = EngineMetrics("m")
    for executed in (step(), step(num_tokens=28), DECODE):
        metrics.observe(executed)
    prefill, decode = {"bucket_name": "prefill_s128"}, {"bucket_name": "decode_b4_w8"}
    assert sample(metrics, "vllm_neuron:num_batched_tokens_padding_sum", **prefill) == 28 + 100
    assert sample(metrics, "vllm_neuron:num_batched_tokens_padding_count", **prefill) == 2
    assert sample(metrics, "vllm_neuron:num_seqs_padding_sum", **decode) == 2
    assert sample(metrics, "vllm_neuron:num_batched_tokens_padding_count", **decode) is None
    assert sample(metrics, "vllm_neuron:neff_execution_count_total", **prefill) == 2
    assert sample(metrics, "vllm_neuron:neff_execution_count_total", **decode) == 1


def test_gauges_hold_the_latest_step() -> None:
    metrics = EngineMetrics("m")
    metrics.observe(step())
    metrics.observe(DECODE)
    assert sample(metrics, "vllm:num_requests_running") == 2
    assert sample(metrics, "vllm:num_requests_waiting") == 0
    assert sample(metrics, "vllm:kv_cache_usage_perc") == 0.5


def test_two_engines_have_registries_of_their_own() -> None:
    first, second = EngineMetrics("m"), EngineMetrics("m")
    first.observe(step())
    assert sample(second, "vllm:num_requests_running") is None
