"""Writes the random model as the files that users bring: GGUF and a Hugging Face folder."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import pre_tokenizers

from segattn.runner.checkpoint import TensorNames
from segattn.runner.gguf_checkpoint import GGUF_NAMES
from segattn.runner.llama import Float32Array, LlamaWeights
from segattn.runner.safetensors_checkpoint import HUGGING_FACE_NAMES
from segattn.runner.tokenizer import bpe_backend
from segattn.tests.runner.random_model import CONFIG

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS_TOKEN_ID = 2
MERGES = [("h", "e"), ("t", "he"), ("Ġ", "the"), ("1", "2")]


def vocabulary() -> list[str]:
    """Special tokens, the bytes, the results of the merges, then unused entries."""
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [left + right for left, right in MERGES]
    return tokens + [f"<unused{i}>" for i in range(CONFIG.vocab_size - len(tokens))]


def named_tensors(weights: LlamaWeights, names: TensorNames) -> Iterator[tuple[str, Float32Array]]:
    """Every tensor under its name in the file; none for a tied output matrix."""
    yield names.embedding, weights.embedding
    yield names.final_norm, weights.final_norm
    if weights.lm_head is not weights.embedding:
        yield names.lm_head, weights.lm_head
    for index, layer in enumerate(weights.layers):
        for field, name in names.layer_tensors.items():
            yield names.layer.format(index=index, name=name), getattr(layer, field)


def write_gguf(path: Path, weights: LlamaWeights, **changed: Any) -> Path:
    """Write a GGUF file; `changed` replaces metadata values (None leaves the key out)."""
    metadata = {
        "architecture": "llama",
        "context_length": CONFIG.max_position_embeddings,
        "pre": "smollm",
        "add_bos": False,
        "rope_scaling": None,
        "head_count": CONFIG.num_q_heads,
        "tokenizer_model": "gpt2",
        **changed,
    }
    writer = gguf.GGUFWriter(path, metadata["architecture"])
    writer.add_block_count(CONFIG.num_layers)
    writer.add_context_length(metadata["context_length"])
    writer.add_embedding_length(CONFIG.hidden_size)
    writer.add_feed_forward_length(CONFIG.intermediate_size)
    if metadata["head_count"] is not None:
        writer.add_head_count(metadata["head_count"])
    writer.add_head_count_kv(CONFIG.num_kv_heads)
    writer.add_key_length(CONFIG.head_dim)
    writer.add_rope_dimension_count(CONFIG.head_dim)
    writer.add_rope_freq_base(CONFIG.rope_theta)
    writer.add_layer_norm_rms_eps(CONFIG.rms_norm_eps)
    if metadata["rope_scaling"] is not None:
        writer.add_rope_scaling_type(metadata["rope_scaling"])
    writer.add_tokenizer_model(metadata["tokenizer_model"])
    writer.add_tokenizer_pre(metadata["pre"])
    tokens = vocabulary()
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in MERGES])
    writer.add_eos_token_id(EOS_TOKEN_ID)
    writer.add_bos_token_id(1)
    writer.add_add_bos_token(metadata["add_bos"])
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, tensor in named_tensors(weights, GGUF_NAMES):
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def half_split_weights(weights: LlamaWeights) -> LlamaWeights:
    """The same model for half-split RoPE: the rows of q and k in another order."""
    half = CONFIG.head_dim // 2
    order = np.arange(CONFIG.head_dim).reshape(half, 2).T.ravel()

    def reorder(matrix: Float32Array) -> Float32Array:
        heads = matrix.reshape(-1, CONFIG.head_dim, CONFIG.hidden_size)
        return heads[:, order].reshape(matrix.shape)

    layers = tuple(
        type(layer)(
            **(vars(layer) | {"q_proj": reorder(layer.q_proj), "k_proj": reorder(layer.k_proj)})
        )
        for layer in weights.layers
    )
    return LlamaWeights(weights.embedding, layers, weights.final_norm, weights.lm_head)


def write_hugging_face(folder: Path, weights: LlamaWeights, **changed: Any) -> Path:
    """Write a Hugging Face folder in two bfloat16 shards; `changed` replaces config values."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": CONFIG.num_layers,
        "hidden_size": CONFIG.hidden_size,
        "intermediate_size": CONFIG.intermediate_size,
        "num_attention_heads": CONFIG.num_q_heads,
        "num_key_value_heads": CONFIG.num_kv_heads,
        "head_dim": CONFIG.head_dim,
        "vocab_size": CONFIG.vocab_size,
        "max_position_embeddings": CONFIG.max_position_embeddings,
        "rope_theta": CONFIG.rope_theta,
        "rms_norm_eps": CONFIG.rms_norm_eps,
        "rope_scaling": None,
        "hidden_act": "silu",
        "tie_word_embeddings": weights.lm_head is weights.embedding,
        "eos_token_id": [EOS_TOKEN_ID, 0],
        **changed,
    }
    (folder / "config.json").write_text(json.dumps(config))
    backend = bpe_backend(vocabulary(), MERGES, [0, 1, 2], pre_tokenizer="smollm", bos_token=None)
    (folder / "tokenizer.json").write_text(backend.to_str())
    settings = {
        "chat_template": CHAT_TEMPLATE,
        "eos_token": "<|im_end|>",
        "bos_token": {"content": "<|im_start|>"},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tensors = {
        name: tensor.astype(ml_dtypes.bfloat16)
        for name, tensor in named_tensors(half_split_weights(weights), HUGGING_FACE_NAMES)
    }
    names = sorted(tensors)
    for shard, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, folder / f"model-{shard}.safetensors")
    return folder
