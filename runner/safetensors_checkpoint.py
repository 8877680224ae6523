"""Read a Hugging Face folder of the Llama family: config.json, tokenizer.json, safetensors."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..reference.extras import MissingExtraError
from .checkpoint import Checkpoint, CheckpointError, TensorNames, assemble_weights
from .llama import Array, LlamaConfig
from .tokenizer import Tokenizer

HUGGING_FACE_NAMES = TensorNames(
    embedding="model.embed_tokens.weight",
    final_norm="model.norm.weight",
    lm_head="lm_head.weight",
    layer="model.layers.{index}.{name}.weight",
    layer_tensors={
        "attn_norm": "input_layernorm",
        "q_proj": "self_attn.q_proj",
        "k_proj": "self_attn.k_proj",
        "v_proj": "self_attn.v_proj",
        "o_proj": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "gate_proj": "mlp.gate_proj",
        "up_proj": "mlp.up_proj",
        "down_proj": "mlp.down_proj",
    },
)

SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)


def read_safetensors(folder: Path) -> Checkpoint:
    """Read a model. CheckpointError when a file is missing, broken or of an unsupported kind."""
    try:
        settings = _json(folder / "config.json")
        config = _config(settings)
        tokenizer = _tokenizer(folder, settings)
        readers = _tensor_readers(folder)
        if settings.get("tie_word_embeddings", False):
            # Some tied checkpoints also store the output matrix; the embedding is what counts.
            readers.pop(HUGGING_FACE_NAMES.lm_head, None)
        elif HUGGING_FACE_NAMES.lm_head not in readers:
            raise CheckpointError(f"tensor {HUGGING_FACE_NAMES.lm_head!r} is missing")
        return Checkpoint(config, assemble_weights(config, HUGGING_FACE_NAMES, readers), tokenizer)
    except (ValueError, OSError) as error:
        raise CheckpointError(f"model {str(folder)!r}: {error}") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.name} is missing") from error
    except ValueError as error:
        raise CheckpointError(f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} must hold a JSON object")
    return value


def _config(settings: dict[str, Any]) -> LlamaConfig:
    architectures = settings.get("architectures")
    if architectures != ["LlamaForCausalLM"]:
        raise CheckpointError(f"architectures={architectures}: must be ['LlamaForCausalLM']")
    for key, allowed in {
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
    }.items():
        if settings.get(key, allowed) != allowed:
            raise CheckpointError(f"config.json: {key}={settings[key]!r}, must be {allowed!r}")
    for key in SIZES:
        value = settings.get(key)
        if value is not None and (type(value) is not int or value < 1):
            raise CheckpointError(f"config.json: {key}={value!r}, must be an integer of at least 1")
    for key in ("rope_theta", "rms_norm_eps"):
        value = settings.get(key)
        if value is not None and (type(value) not in (int, float) or not value > 0):
            raise CheckpointError(f"config.json: {key}={value!r}, must be a number above 0")
    try:
        num_q_heads = settings["num_attention_heads"]
        return LlamaConfig(
            num_layers=settings["num_hidden_layers"],
            hidden_size=settings["hidden_size"],
            intermediate_size=settings["intermediate_size"],
            num_q_heads=num_q_heads,
            num_kv_heads=settings.get("num_key_value_heads", num_q_heads),
            head_dim=settings.get("head_dim") or settings["hidden_size"] // num_q_heads,
            vocab_size=settings["vocab_size"],
            max_position_embeddings=settings["max_position_embeddings"],
            rope_theta=settings.get("rope_theta", 10000.0),
            rms_norm_eps=settings["rms_norm_eps"],
            rope_layout="half_split",
        )
    except KeyError as error:
        raise CheckpointError(f"config.json: key {error} is missing") from error


def _tensor_readers(folder: Path) -> dict[str, Callable[[], Array]]:
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError as error:
        raise MissingExtraError("safetensors", "model") from error
    readers: dict[str, Callable[[], Array]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            file = safe_open(path, framework="numpy")
            names: list[str] = file.keys()  # type: ignore[no-untyped-call]  # partial stubs
            readers |= {name: partial(file.get_tensor, name) for name in names}
        except SafetensorError as error:
            raise CheckpointError(f"{path.name} is not a safetensors file: {error}") from error
    return readers


def _tokenizer(folder: Path, settings: dict[str, Any]) -> Tokenizer:
    try:
        from tokenizers import Tokenizer as Backend
    except ModuleNotFoundError as error:
        raise MissingExtraError("tokenizers", "model") from error
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError("tokenizer.json is missing")
    try:
        backend = Backend.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exception for a broken file
        raise CheckpointError(f"tokenizer.json is not a tokenizer: {error}") from error
    extra = folder / "tokenizer_config.json"
    tokenizer_settings = _json(extra) if extra.is_file() else {}
    eos = settings.get("eos_token_id")
    if eos is None:
        raise CheckpointError("config.json: key 'eos_token_id' is missing")
    return Tokenizer(
        backend,
        stop_token_ids=tuple(eos) if isinstance(eos, list) else (eos,),
        chat_template=_chat_template(folder, tokenizer_settings),
        bos_token=_token_text(tokenizer_settings.get("bos_token")),
        eos_token=_token_text(tokenizer_settings.get("eos_token")),
    )


def _chat_template(folder: Path, tokenizer_settings: dict[str, Any]) -> str | None:
    """The template of its own file, as newer checkpoints have it, or of the tokenizer settings."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = tokenizer_settings.get("chat_template")
    return template if isinstance(template, str) else None


def _token_text(token: str | dict[str, Any] | None) -> str:
    """Text of a special token, which is stored bare or as an object with its `content`."""
    if isinstance(token, dict):
        return str(token["content"])
    return token or ""
