"""Read a Llama-family GGUF file: weights, tokenizer and chat template lie in the one file."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..reference.extras import MissingExtraError
from ..reference.json_files import shown
from .checkpoint import Checkpoint, CheckpointError, TensorNames, assemble_weights
from .llama import LlamaConfig
from .tokenizer import Tokenizer, bpe_backend

GGUF_NAMES = TensorNames(
    embedding="token_embd.weight",
    final_norm="output_norm.weight",
    lm_head="output.weight",
    layer="blk.{index}.{name}.weight",
    layer_tensors={
        "attn_norm": "attn_norm",
        "q_proj": "attn_q",
        "k_proj": "attn_k",
        "v_proj": "attn_v",
        "o_proj": "attn_output",
        "mlp_norm": "ffn_norm",
        "gate_proj": "ffn_gate",
        "up_proj": "ffn_up",
        "down_proj": "ffn_down",
    },
)

MOST = 1 << 24

_CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of <|im_start|> and its like


def read_gguf(path: Path) -> Checkpoint:
    """Read a model. CheckpointError when the file is broken or of an unsupported kind."""
    metadata, tensors = _open(path)
    try:
        tokenizer = _tokenizer(metadata)
        config = _config(metadata, tensors)
        return Checkpoint(config, assemble_weights(config, GGUF_NAMES, tensors), tokenizer)
    # What a damaged file makes the libraries raise is theirs to choose.
    except Exception as error:
        if isinstance(error, MissingExtraError):
            raise
        raise CheckpointError(f"model {str(path)!r}: {error}") from error


class _Metadata:
    """Key-value pairs of a file; a missing key without default is a CheckpointError."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def __call__(self, key: str, default: Any = None) -> Any:
        value = self._fields.get(key, default)
        if value is None:
            raise CheckpointError(f"metadata key {key!r} is missing")
        return value

    def size(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """An integer within `least`..2**24."""
        value: int = self(key, default)
        if type(value) is not int or not least <= value <= MOST:
            raise CheckpointError(
                f"{key}={shown(value)}: must be an integer within {least}..{MOST}"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0."""
        value = self(key, default)
        if type(value) not in (int, float) or not 0 < value < 1e30:
            raise CheckpointError(f"{key}={shown(value)}: must be a number above 0")
        return float(value)

    def texts(self, key: str) -> list[str]:
        """A list of texts."""
        value = self(key)
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise CheckpointError(f"{key}={shown(value)}: must be a list of texts")
        return value


def _open(path: Path) -> tuple[_Metadata, dict[str, partial[Any]]]:
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise MissingExtraError("gguf", "model") from error

    class PlainReader(gguf.GGUFReader):  # type: ignore[misc]  # gguf has no types
        """Reads through a plain array view of the file map.

        The reader slices its data a million times to parse the vocabulary, and each slice of a
        np.memmap costs four times that of an array.
        """

        @property
        def data(self) -> Any:
            return self._plain_data

        @data.setter
        def data(self, mapped: Any) -> None:
            self._plain_data = np.asarray(mapped)

    try:
        reader = PlainReader(path)
        fields = {key: field.contents() for key, field in reader.fields.items()}
    # What a damaged file makes the library raise: bad magic, lengths past the end, bad text.
    except Exception as error:
        raise CheckpointError(f"model {str(path)!r}: not a readable GGUF file: {error}") from error
    tensors: dict[str, partial[Any]] = {}
    for tensor in reader.tensors:
        if tensor.name in tensors:
            raise CheckpointError(f"model {str(path)!r}: tensor {tensor.name!r} is there twice")
        tensors[tensor.name] = partial(gguf.dequantize, tensor.data, tensor.tensor_type)
    return _Metadata(fields), tensors


def _config(metadata: _Metadata, tensors: dict[str, partial[Any]]) -> LlamaConfig:
    architecture = metadata("general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"architecture {architecture!r}: must be 'llama'")
    scaling = metadata("llama.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in tensors:
        raise CheckpointError(f"rope scaling {scaling!r} is not supported: must be 'none'")
    if metadata("llama.attention.sliding_window", 0):
        raise CheckpointError("sliding windows are not supported: llama.attention.sliding_window")
    if metadata("llama.expert_count", 0):
        raise CheckpointError("mixture of experts is not supported: llama.expert_count must be 0")
    hidden_size = metadata.size("llama.embedding_length")
    num_q_heads = metadata.size("llama.attention.head_count")
    head_dim = metadata.size("llama.attention.key_length", hidden_size // num_q_heads)
    rotated = metadata.size("llama.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise CheckpointError(f"llama.rope.dimension_count={rotated}: must be {head_dim}")
    return LlamaConfig(
        num_layers=metadata.size("llama.block_count"),
        hidden_size=hidden_size,
        intermediate_size=metadata.size("llama.feed_forward_length"),
        num_q_heads=num_q_heads,
        num_kv_heads=metadata.size("llama.attention.head_count_kv", num_q_heads),
        head_dim=head_dim,
        vocab_size=len(metadata.texts("tokenizer.ggml.tokens")),
        max_position_embeddings=metadata.size("llama.context_length"),
        rope_theta=metadata.number("llama.rope.freq_base", 10000.0),
        rms_norm_eps=metadata.number("llama.attention.layer_norm_rms_epsilon"),
        rope_layout="interleaved",
    )


def _tokenizer(metadata: _Metadata) -> Tokenizer:
    kind = metadata("tokenizer.ggml.model")
    if kind != "gpt2":
        raise CheckpointError(f"tokenizer model {kind!r}: must be 'gpt2' (byte-level BPE)")
    tokens = metadata.texts("tokenizer.ggml.tokens")
    eos_token_id = metadata.size("tokenizer.ggml.eos_token_id", least=0)
    end_of_turn = metadata.size("tokenizer.ggml.eot_token_id", eos_token_id, least=0)
    bos_token = tokens[metadata.size("tokenizer.ggml.bos_token_id", eos_token_id, least=0)]
    backend = bpe_backend(
        tokens,
        [_merge_pair(merge) for merge in metadata.texts("tokenizer.ggml.merges")],
        [
            index
            for index, kind in enumerate(metadata("tokenizer.ggml.token_type"))
            if kind == _CONTROL_TOKEN
        ],
        pre_tokenizer=metadata("tokenizer.ggml.pre", "gpt-2"),
        bos_token=bos_token if metadata("tokenizer.ggml.add_bos_token", False) else None,
    )
    return Tokenizer(
        backend,
        stop_token_ids=tuple(dict.fromkeys((eos_token_id, end_of_turn))),
        chat_template=metadata("tokenizer.chat_template", "") or None,
        bos_token=bos_token,
        eos_token=tokens[eos_token_id],
    )


def _merge_pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right
