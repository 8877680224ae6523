"""Decoder of the Llama family in NumPy, with the attention left to the caller.

    h = embedding[input_ids]
    for each layer:  h += attention(rope(norm(h) Wq), rope(norm(h) Wk), norm(h) Wv) Wo
                     h += (silu(norm(h) Wgate) * (norm(h) Wup)) Wdown
    logits = norm(h) lm_head

The same arithmetic serves the padded forward pass on the paged cache (model_runner.py) and the
plain one without cache (plain_forward.py): they differ in the attention alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Float32Array = npt.NDArray[np.float32]

Attention = Callable[[int, Array, Array, Array], Array]
"""(layer, q [Hq, S, d], k [Hkv, S, d], v [Hkv, S, d]) -> [Hq, S, d], all in the model's dtype."""

DTYPES: dict[str, npt.DTypeLike] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}

RopeLayout = Literal["interleaved", "half_split"]
"""Which dimensions a rotation pairs: (2i, 2i+1), how GGUF stores this architecture, or
(i, i + d/2), how Hugging Face checkpoints do."""


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and constants of one model."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float
    rope_layout: RopeLayout


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one decoder layer; matrices are [out, in]."""

    attn_norm: Float32Array  # [hidden]
    q_proj: Float32Array  # [Hq * d, hidden]
    k_proj: Float32Array  # [Hkv * d, hidden]
    v_proj: Float32Array  # [Hkv * d, hidden]
    o_proj: Float32Array  # [hidden, Hq * d]
    mlp_norm: Float32Array  # [hidden]
    gate_proj: Float32Array  # [intermediate, hidden]
    up_proj: Float32Array  # [intermediate, hidden]
    down_proj: Float32Array  # [hidden, intermediate]


@dataclass(frozen=True)
class LlamaWeights:
    """Weights of a model; with tied embeddings `lm_head` is the very array `embedding`."""

    embedding: Float32Array  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Float32Array  # [hidden]
    lm_head: Float32Array  # [vocab, hidden]


class Llama:
    """A model that can run: configuration, weights and the dtype of its activations.

    In bfloat16 weights and every activation are rounded to bfloat16 but held and multiplied in
    float32, as a matrix engine that accumulates in float32 does: NumPy has no fast bfloat16.
    """

    def __init__(
        self,
        config: LlamaConfig,
        weights: LlamaWeights,
        dtype: str = "float32",
        *,
        max_positions: int | None = None,
    ) -> None:
        """Uses `weights` as they are in float32, a rounded copy of them in bfloat16.

        `max_positions`: positions that will be used; all of the model's by default. ValueError for
        another dtype.
        """
        self.config = config
        self.dtype = check_dtype(dtype)
        self.weights = weights if dtype == "float32" else _mapped(weights, self._rounded)
        largest = config.max_position_embeddings
        self._cos, self._sin = rope_tables(
            config.head_dim,
            min(max_positions or largest, largest),
            config.rope_theta,
        )

    def forward(
        self, input_ids: npt.NDArray[np.int32], positions: npt.NDArray[np.int32], attend: Attention
    ) -> Float32Array:
        """Hidden states [S, hidden] after the last norm, for tokens [S] at positions [S]."""
        rounded, eps = self._rounded, self.config.rms_norm_eps
        hidden = self.weights.embedding[input_ids]
        for index, layer in enumerate(self.weights.layers):
            normed = rounded(rms_norm(hidden, layer.attn_norm, eps))
            q = self._rotated(self._heads(normed, layer.q_proj), positions)
            k = self._rotated(self._heads(normed, layer.k_proj), positions)
            v = self._heads(normed, layer.v_proj)
            mixed = attend(index, *(x.astype(self.dtype) for x in (q, k, v)))
            merged = mixed.astype(np.float32).transpose(1, 0, 2).reshape(len(input_ids), -1)
            hidden = rounded(hidden + rounded(merged @ layer.o_proj.T))
            normed = rounded(rms_norm(hidden, layer.mlp_norm, eps))
            gated = rounded(silu(rounded(normed @ layer.gate_proj.T)))
            gated = rounded(gated * rounded(normed @ layer.up_proj.T))
            hidden = rounded(hidden + rounded(gated @ layer.down_proj.T))
        return rounded(rms_norm(hidden, self.weights.final_norm, eps))

    def logits(self, hidden: Float32Array) -> Float32Array:
        """Logits [n, vocab] of hidden states [n, hidden]."""
        return self._rounded(hidden @ self.weights.lm_head.T)

    def _heads(self, normed: Float32Array, projection: Float32Array) -> Float32Array:
        """Project [S, hidden] and split into heads [H, S, d]."""
        projected = self._rounded(normed @ projection.T)
        heads = projected.reshape(len(normed), -1, self.config.head_dim)
        return np.transpose(heads, (1, 0, 2))

    def _rotated(self, heads: Float32Array, positions: npt.NDArray[np.int32]) -> Float32Array:
        rotated = apply_rope(
            heads, self._cos[positions], self._sin[positions], self.config.rope_layout
        )
        return self._rounded(rotated)

    def _rounded(self, values: Float32Array) -> Float32Array:
        if self.dtype == np.float32:
            return values
        return values.astype(self.dtype).astype(np.float32)


def check_dtype(name: str) -> np.dtype[Any]:
    """The dtype of this name. ValueError when it is none of DTYPES."""
    if name not in DTYPES:
        raise ValueError(f"dtype={name!r}: must be one of {', '.join(DTYPES)}")
    return np.dtype(DTYPES[name])


def rms_norm(x: Float32Array, weight: Float32Array, eps: float) -> Float32Array:
    """Root-mean-square norm, x / sqrt(mean(x^2) + eps) * weight, over the last axis."""
    mean_square: Float32Array = np.mean(np.square(x), axis=-1, keepdims=True)
    normed: Float32Array = x / np.sqrt(mean_square + np.float32(eps)) * weight
    return normed


def silu(x: Float32Array) -> Float32Array:
    """Sigmoid-weighted x, x * sigmoid(x), through tanh so that no exponential overflows."""
    half = np.float32(0.5)
    activated: Float32Array = x * (half + half * np.tanh(half * x))
    return activated


def rope_tables(
    head_dim: int, num_positions: int, theta: float
) -> tuple[Float32Array, Float32Array]:
    """Cos and sin [num_positions, d/2] of position * theta^(-2i/d) (RoFormer, arXiv:2104.09864)."""
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    angles = np.arange(num_positions, dtype=np.float64)[:, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def apply_rope(
    x: Float32Array, cos: Float32Array, sin: Float32Array, layout: RopeLayout
) -> Float32Array:
    """Rotate x [H, S, d] by cos, sin [S, d/2]."""
    half = x.shape[-1] // 2
    interleaved = layout == "interleaved"
    first = slice(0, None, 2) if interleaved else slice(0, half)
    second = slice(1, None, 2) if interleaved else slice(half, None)
    result = np.empty_like(x)
    result[..., first] = x[..., first] * cos - x[..., second] * sin
    result[..., second] = x[..., first] * sin + x[..., second] * cos
    return result


def _mapped(
    weights: LlamaWeights, function: Callable[[Float32Array], Float32Array]
) -> LlamaWeights:
    """Apply `function` to every array once: tied embeddings stay tied."""
    embedding = function(weights.embedding)
    tied = weights.lm_head is weights.embedding
    return LlamaWeights(
        embedding,
        tuple(
            LayerWeights(**{name: function(array) for name, array in vars(layer).items()})
            for layer in weights.layers
        ),
        function(weights.final_norm),
        embedding if tied else function(weights.lm_head),
    )
