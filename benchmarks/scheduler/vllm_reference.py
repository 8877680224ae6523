"""Builds vLLM's own schedulers and requests from this project's configuration, offline.

No weights and no network: the model is a config.json of a few lines.
"""

import json
import tempfile
from collections.abc import Mapping
from copy import copy
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from segattn.reference.extras import MissingExtraError
from segattn.scheduler import NeuronPolicy, SchedulerConfig
from segattn.scheduler.vllm_plugin import NeuronAsyncScheduler, NeuronScheduler

try:
    import torch
    from vllm import config as vllm_config
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager
except ModuleNotFoundError as error:
    raise MissingExtraError(str(error.name), "vllm") from error

KINDS: dict[str, type[Any]] = {
    "base": Scheduler,
    "async": AsyncScheduler,
    "neuron": NeuronScheduler,
    "neuron_async": NeuronAsyncScheduler,
}

_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 512,
    "max_position_embeddings": 1 << 20,
    "torch_dtype": "float32",
}


@cache
def _model_config() -> Any:
    with tempfile.TemporaryDirectory(prefix="segattn_model_") as folder:
        Path(folder, "config.json").write_text(json.dumps(_MODEL))
        return vllm_config.ModelConfig(
            model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=1024
        )


@cache
def _init_hashes() -> None:
    init_none_hash(sha256)


def make_real_scheduler(
    kind: str, config: SchedulerConfig, policy: NeuronPolicy | None = None
) -> Any:
    """VLLM's scheduler of this kind, or the Neuron rules over it, with `config`."""
    _init_hashes()
    model = copy(_model_config())
    model.max_model_len = config.max_model_len
    whole = vllm_config.VllmConfig(
        model_config=model,
        scheduler_config=vllm_config.SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            is_encoder_decoder=False,
            enable_chunked_prefill=config.enable_chunked_prefill,
            policy=config.policy,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            scheduler_reserve_full_isl=config.scheduler_reserve_full_isl,
            watermark=config.watermark,
            async_scheduling=False,
        ),
        cache_config=vllm_config.CacheConfig(
            block_size=config.block_size, enable_prefix_caching=config.enable_prefix_caching
        ),
        device_config=vllm_config.DeviceConfig("cpu"),
    )
    # The CPU platform prefers other values; a scheduler takes any.
    whole.cache_config.block_size = config.block_size
    whole.cache_config.enable_prefix_caching = config.enable_prefix_caching
    whole.cache_config.num_gpu_blocks = config.num_blocks
    whole.scheduler_config.max_num_batched_tokens = config.max_num_batched_tokens
    whole.scheduler_config.max_num_scheduled_tokens = config.max_num_scheduled_tokens
    whole.scheduler_config.enable_chunked_prefill = config.enable_chunked_prefill
    whole.scheduler_config.async_scheduling = kind.endswith("async")
    whole.additional_config = {"neuron_config": _neuron_config(config, policy)}
    spec = FullAttentionSpec(
        block_size=config.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    scheduler = KINDS[kind](
        vllm_config=whole,
        kv_cache_config=KVCacheConfig(
            num_blocks=config.num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        structured_output_manager=StructuredOutputManager(whole),
        block_size=config.block_size,
    )
    # What a speculative_config would set; a drafter of its own is not needed for it.
    scheduler.num_spec_tokens = config.num_speculative_tokens
    scheduler.num_lookahead_tokens = config.num_lookahead_tokens
    if kind.endswith("async"):
        scheduler._spec_token_placeholders = [-1] * config.num_speculative_tokens
    if kind.startswith("neuron"):
        scheduler.rules.turns.max_decodes = scheduler.answers.max_decodes()
    return scheduler


def _neuron_config(config: SchedulerConfig, policy: NeuronPolicy | None) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if policy is not None:
        options["neuron_policy"] = asdict(policy)
    for name in ("num_batched_tokens_buckets", "num_seqs_buckets"):
        if getattr(config, name) is not None:
            options[name] = list(getattr(config, name))
    return options


def make_real_request(given: Mapping[str, Any], config: SchedulerConfig, **more: Any) -> Any:
    """VLLM's request of an "add" event of a trace."""
    sampling = SamplingParams(
        max_tokens=given["max_tokens"],
        temperature=0.0,
        stop_token_ids=list(given.get("stop", ())),
        min_tokens=given.get("min_tokens", 0),
        detokenize=False,
        skip_reading_prefix_cache=True if given.get("skip_read") else None,
    )
    sampling.update_from_generation_config({}, given.get("eos", 2))
    hasher = (
        get_request_block_hasher(config.block_size, sha256)
        if config.enable_prefix_caching
        else None
    )
    return Request(
        request_id=given["id"],
        prompt_token_ids=list(given["prompt"]),
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=float(given.get("arrival", 0.0)),
        priority=given.get("priority", 0),
        cache_salt=given.get("salt"),
        block_hasher=hasher,
        **more,
    )
