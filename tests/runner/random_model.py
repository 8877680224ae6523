"""A two-layer Llama with random weights: the quick-test model of this folder."""

import numpy as np

from segattn.runner.llama import Float32Array, LayerWeights, Llama, LlamaConfig, LlamaWeights

CONFIG = LlamaConfig(
    num_layers=2,
    hidden_size=96,
    intermediate_size=160,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=320,
    max_position_embeddings=512,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    rope_layout="interleaved",
)


def random_weights(seed: int = 0, *, tied: bool = False) -> LlamaWeights:
    """Weights under which attention is far from uniform and greedy choices have clear margins."""
    rng = np.random.default_rng(seed)
    hidden, intermediate = CONFIG.hidden_size, CONFIG.intermediate_size
    q_size, kv_size = (n * CONFIG.head_dim for n in (CONFIG.num_q_heads, CONFIG.num_kv_heads))

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Float32Array:
        return rng.normal(0, gain * columns**-0.5, (rows, columns)).astype(np.float32)

    def norm() -> Float32Array:
        return rng.uniform(0.5, 1.5, hidden).astype(np.float32)

    layers = tuple(
        LayerWeights(
            attn_norm=norm(),
            q_proj=matrix(q_size, hidden, gain=2),
            k_proj=matrix(kv_size, hidden, gain=2),
            v_proj=matrix(kv_size, hidden),
            o_proj=matrix(hidden, q_size),
            mlp_norm=norm(),
            gate_proj=matrix(intermediate, hidden),
            up_proj=matrix(intermediate, hidden),
            down_proj=matrix(hidden, intermediate),
        )
        for _ in range(CONFIG.num_layers)
    )
    embedding = matrix(CONFIG.vocab_size, hidden, gain=8)
    lm_head = embedding if tied else matrix(CONFIG.vocab_size, hidden, gain=4)
    return LlamaWeights(embedding, layers, norm(), lm_head)


def random_model(seed: int = 0, *, dtype: str = "float32") -> Llama:
    """A model ready to run."""
    return Llama(CONFIG, random_weights(seed), dtype)
