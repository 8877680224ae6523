"""A model as read from disk, and the assembly of its weights with every shape checked."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from .llama import Array, Float32Array, LayerWeights, LlamaConfig, LlamaWeights
from .tokenizer import Tokenizer


class CheckpointError(ValueError):
    """A model is missing, broken, or of a kind that is not supported."""


@dataclass(frozen=True)
class Checkpoint:
    """Configuration, weights and tokenizer of one model."""

    config: LlamaConfig
    weights: LlamaWeights
    tokenizer: Tokenizer


@dataclass(frozen=True)
class TensorNames:
    """How a file format names the tensors of a Llama model."""

    embedding: str
    final_norm: str
    lm_head: str
    layer: str
    """Format string with `index` and `name`."""
    layer_tensors: Mapping[str, str]
    """Field of LayerWeights -> `name`."""


def assemble_weights(
    config: LlamaConfig, names: TensorNames, readers: Mapping[str, Callable[[], Array]]
) -> LlamaWeights:
    """Read the tensors one by one, so that no second copy of the whole model ever exists.

    `readers` maps every tensor name of the file to the function that reads it. Without an output
    matrix the embedding serves as one. Raises CheckpointError for a tensor that is missing, that
    has another shape than `config` says or values that are not finite, and for a tensor that this
    architecture has no use for, as a bias: ignoring it would change the model.
    """
    used: set[str] = set()

    def read(name: str, shape: tuple[int, ...]) -> Float32Array:
        if name not in readers:
            raise CheckpointError(f"tensor {name!r} is missing")
        used.add(name)
        tensor = np.ascontiguousarray(readers[name](), dtype=np.float32)
        if tensor.shape != shape:
            raise CheckpointError(f"tensor {name!r} has shape {tensor.shape}, must be {shape}")
        if not np.isfinite(tensor).all():
            raise CheckpointError(f"tensor {name!r} has values that are not finite")
        # Readers may hand out views of a read-only file map.
        return tensor if tensor.flags.writeable else tensor.copy()

    shapes = layer_shapes(config)
    layers = tuple(
        LayerWeights(
            **{
                field: read(names.layer.format(index=index, name=name), shapes[field])
                for field, name in names.layer_tensors.items()
            }
        )
        for index in range(config.num_layers)
    )
    vocabulary = (config.vocab_size, config.hidden_size)
    embedding = read(names.embedding, vocabulary)
    tied = names.lm_head not in readers
    weights = LlamaWeights(
        embedding=embedding,
        layers=layers,
        final_norm=read(names.final_norm, (config.hidden_size,)),
        lm_head=embedding if tied else read(names.lm_head, vocabulary),
    )
    if extra := sorted(readers.keys() - used):
        raise CheckpointError(
            f"tensor {extra[0]!r} is none of a Llama model with {config.num_layers} layers"
        )
    return weights


def layer_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each field of LayerWeights."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_size = config.num_q_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    return {
        "attn_norm": (hidden,),
        "q_proj": (q_size, hidden),
        "k_proj": (kv_size, hidden),
        "v_proj": (kv_size, hidden),
        "o_proj": (hidden, q_size),
        "mlp_norm": (hidden,),
        "gate_proj": (intermediate, hidden),
        "up_proj": (intermediate, hidden),
        "down_proj": (hidden, intermediate),
    }
