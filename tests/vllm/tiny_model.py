"""Runs vLLM's engine on a tiny random Llama, by command: prints tokens and steps as JSON.

    python tiny_model.py FOLDER SCHEDULER_CLS|default sync|async

Block and model lengths are such that few requests fit at once: 19 usable blocks of 32 tokens, 8 for
one request of max_model_len.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm import LLM, SamplingParams
from vllm.config import VllmConfig
from vllm.platforms.cpu import CpuPlatform

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PROMPT_LENGTHS = [5, 33, 100, 64, 150, 17, 31, 128, 200]
MAX_TOKENS = 40


def write_model(folder: Path) -> None:
    """A checkpoint of random weights, large enough that attention decides the tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    generator = torch.Generator().manual_seed(0)
    hidden, inner, vocabulary = 64, 128, 512
    query, key_value = 4 * 32, 2 * 32

    def weights(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 0.3

    tensors = {
        "model.embed_tokens.weight": weights(vocabulary, hidden),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": weights(vocabulary, hidden),
    }
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "input_layernorm.weight": torch.ones(hidden),
            prefix + "post_attention_layernorm.weight": torch.ones(hidden),
            prefix + "self_attn.q_proj.weight": weights(query, hidden),
            prefix + "self_attn.k_proj.weight": weights(key_value, hidden),
            prefix + "self_attn.v_proj.weight": weights(key_value, hidden),
            prefix + "self_attn.o_proj.weight": weights(hidden, query),
            prefix + "mlp.gate_proj.weight": weights(inner, hidden),
            prefix + "mlp.up_proj.weight": weights(inner, hidden),
            prefix + "mlp.down_proj.weight": weights(hidden, inner),
        }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _count_steps(scheduler: Any) -> list[dict[str, int]]:
    """Note, for each step of `scheduler` from now on, its prefills, decodes and preemptions."""
    steps: list[dict[str, int]] = []
    schedule = scheduler.schedule

    def noted(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        cached = output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        prefills = len(output.scheduled_new_reqs) + sum(
            count < scheduler.requests[request_id].num_prompt_tokens
            for request_id, count in computed.items()
        )
        decodes = len(output.num_scheduled_tokens) - prefills
        preempted = len(output.preempted_req_ids or ())
        steps.append({"prefills": prefills, "decodes": decodes, "preempted": preempted})
        return output

    scheduler.schedule = noted
    return steps


def _keep_async_scheduling() -> None:
    """Let the CPU platform, which has no need of it, keep `async_scheduling` as the user set it."""
    update = CpuPlatform.check_and_update_config.__func__

    def updated(cls: type[CpuPlatform], vllm_config: VllmConfig) -> None:
        update(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(updated)


def main(folder: str, scheduler_cls: str, loop: str) -> None:
    """Generate greedily for all prompts at once and print the outcome."""
    if loop == "async":
        _keep_async_scheduling()
    options: dict[str, Any] = {} if scheduler_cls == "default" else {"scheduler_cls": scheduler_cls}
    llm = LLM(
        model=folder,
        skip_tokenizer_init=True,
        load_format="safetensors",
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=6,
        max_num_batched_tokens=64,
        enable_prefix_caching=True,
        seed=0,
        block_size=32,
        num_gpu_blocks_override=20,
        async_scheduling=loop == "async",
        disable_log_stats=True,
        **options,
    )
    core = llm.llm_engine.engine_core.engine_core
    scheduler = core.scheduler
    steps = _count_steps(scheduler)
    prompts = [
        {"prompt_token_ids": [(7 * number + 3 * i) % 500 + 3 for i in range(length)]}
        for number, length in enumerate(PROMPT_LENGTHS)
    ]
    sampling = SamplingParams(
        temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False
    )
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    outcome = {
        "scheduler": type(scheduler).__module__ + "." + type(scheduler).__name__,
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "steps": steps,
        "loop": "sync" if core.batch_queue is None else "async",
    }
    print("OUTCOME " + json.dumps(outcome))


if __name__ == "__main__":
    main(*sys.argv[1:])
