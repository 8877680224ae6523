"""Read a Hugging Face folder of the Llama family: config.json, tokenizer.json, safetensors."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..reference.extras import MissingExtraError
from ..reference.json_files import read_object, shown
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

ONLY: dict[str, Any] = {
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "partial_rotary_factor": 1.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "quantization_config": None,
    "attention_multiplier": None,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "num_local_experts": None,
    "is_encoder_decoder": False,
}
"""Settings that change the arithmetic, with the one value that this model has."""

MAX_CONFIG_BYTES = 1 << 24
MOST = 1 << 24

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
        settings = read_object(folder / "config.json", MAX_CONFIG_BYTES)
        config = _config(settings)
        tokenizer = _tokenizer(folder, settings)
        readers = _tensor_readers(folder)
        if settings.get("tie_word_embeddings", False):
            # Some tied checkpoints also store the output matrix; the embedding is what counts.
            readers.pop(HUGGING_FACE_NAMES.lm_head, None)
        elif HUGGING_FACE_NAMES.lm_head not in readers:
            raise CheckpointError(f"tensor {HUGGING_FACE_NAMES.lm_head!r} is missing")
        return Checkpoint(config, assemble_weights(config, HUGGING_FACE_NAMES, readers), tokenizer)
    # What damaged files make the libraries raise is theirs to choose.
    except Exception as error:
        if isinstance(error, MissingExtraError):
            raise
        raise CheckpointError(f"model {str(folder)!r}: {error}") from error


def _config(settings: dict[str, Any]) -> LlamaConfig:
    architectures = settings.get("architectures")
    if architectures != ["LlamaForCausalLM"]:
        raise CheckpointError(f"architectures={shown(architectures)}: must be ['LlamaForCausalLM']")
    for key, allowed in ONLY.items():
        if settings.get(key, allowed) != allowed:
            raise CheckpointError(
                f"config.json: {key}={shown(settings[key])}, must be {allowed!r} or left out"
            )
    if set(settings.get("layer_types") or ["full_attention"]) != {"full_attention"}:
        raise CheckpointError("config.json: layer_types must all be 'full_attention'")
    for key in SIZES:
        value = settings.get(key)
        if value is not None and (type(value) is not int or not 1 <= value <= MOST):
            raise CheckpointError(
                f"config.json: {key}={shown(value)}, must be an integer of at least 1"
            )
    rope = _rope_parameters(settings)
    for place in (settings, rope):
        for key in place.keys() & {"rope_theta", "rms_norm_eps"}:
            value = place[key]
            if type(value) not in (int, float) or not 0 < value < 1e30:
                raise CheckpointError(
                    f"config.json: {key}={shown(value)}, must be a number above 0"
                )
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
            rope_theta=rope.get("rope_theta", settings.get("rope_theta", 10000.0)),
            rms_norm_eps=settings["rms_norm_eps"],
            rope_layout="half_split",
        )
    except KeyError as error:
        raise CheckpointError(f"config.json: key {error} is missing") from error


def _rope_parameters(settings: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters`, where transformers 5 keeps theta. CheckpointError for a scaled RoPE."""
    found = settings.get("rope_parameters") or {}
    if not isinstance(found, dict) or found.keys() - {"rope_type", "rope_theta"}:
        raise CheckpointError(
            f"config.json: rope_parameters={shown(found)}, must hold rope_type and rope_theta alone"
        )
    if found.get("rope_type", "default") != "default":
        raise CheckpointError(
            f"config.json: rope_type={shown(found['rope_type'])}, must be 'default'"
        )
    if (
        "rope_theta" in found
        and settings.get("rope_theta", found["rope_theta"]) != (found["rope_theta"])
    ):
        raise CheckpointError("config.json: rope_theta and rope_parameters.rope_theta differ")
    return found


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
            for name in names:
                if name in readers:
                    raise CheckpointError(f"tensor {name!r} is in two files, {path.name} is one")
                if not name.endswith("rotary_emb.inv_freq"):  # old checkpoints store the table too
                    readers[name] = partial(file.get_tensor, name)
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
    tokenizer_settings = read_object(extra, MAX_CONFIG_BYTES) if extra.is_file() else {}
    eos = settings.get("eos_token_id")
    stops: list[Any] = eos if isinstance(eos, list) else [eos]
    if not stops or any(type(i) is not int or not 0 <= i < MOST for i in stops):
        raise CheckpointError(
            f"config.json: eos_token_id={shown(eos)}, must be a token id or a list of them"
        )
    return Tokenizer(
        backend,
        stop_token_ids=tuple(stops),
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
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None and not isinstance(text, str):
        raise CheckpointError(f"tokenizer_config.json: special token {shown(token)} is no text")
    return text or ""
