"""Prometheus counters of padding and load (extra `metrics`).

Names and labels are vLLM Neuron's (prefix `vllm_neuron:`) and vLLM's (prefix `vllm:`) where the
meaning is the same, so that a dashboard made for them shows these too.
"""

from ..reference.extras import MissingExtraError
from .step import Step

try:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
except ModuleNotFoundError as error:
    raise MissingExtraError("prometheus_client", "metrics") from error

_NUM_SEQS_EDGES = (0, 1, 2, 4, 8, 16, 32, 64, 128)
_NUM_TOKENS_EDGES = (0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


class EngineMetrics:
    """Metrics of one engine in a registry of its own.

    Serve them with `prometheus_client.start_http_server(port, registry=metrics.registry)`.
    """

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        by_bucket = ("model_name", "bucket_name")
        self._seqs_padding = Histogram(
            "vllm_neuron:num_seqs_padding",
            "Padded batch rows of a decode step",
            by_bucket,
            buckets=_NUM_SEQS_EDGES,
            registry=self.registry,
        )
        self._tokens_padding = Histogram(
            "vllm_neuron:num_batched_tokens_padding",
            "Padded tokens of a prefill step",
            by_bucket,
            buckets=_NUM_TOKENS_EDGES,
            registry=self.registry,
        )
        self._executions = Counter(
            "vllm_neuron:neff_execution_count",
            "Executions of a compiled graph",
            by_bucket,
            registry=self.registry,
        )
        self._running = self._gauge("vllm:num_requests_running", "Requests admitted")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Requests queued")
        self._usage = self._gauge("vllm:kv_cache_usage_perc", "Used share of the KV cache, 0 to 1")

    def observe(self, step: Step) -> None:
        """Count one executed step."""
        labels = (self._model_name, step.graph)
        padding = step.num_tokens_padded - step.num_tokens
        is_decode = step.state == "ACTIVE_DECODE"
        histogram = self._seqs_padding if is_decode else self._tokens_padding
        histogram.labels(*labels).observe(padding)
        self._executions.labels(*labels).inc()
        self._running.labels(self._model_name).set(step.num_running)
        self._waiting.labels(self._model_name).set(step.num_waiting)
        self._usage.labels(self._model_name).set(step.kv_cache_usage)

    def _gauge(self, name: str, meaning: str) -> Gauge:
        return Gauge(name, meaning, ("model_name",), registry=self.registry)
