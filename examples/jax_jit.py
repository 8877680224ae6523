"""JAX functions under jax.jit: the cache goes in and comes out."""

import jax
import jax.numpy as jnp
import numpy as np

from segattn.kernels import jax_ops
from segattn.reference import attention as reference

Caches = tuple[jax.Array, jax.Array]


def step(
    q: jax.Array, k: jax.Array, v: jax.Array, caches: Caches, slots: jax.Array, prior: jax.Array
) -> tuple[jax.Array, Caches]:
    """Attention of a chunk over `prior` cached tokens and itself; the caches with it inside."""
    out = jax_ops.segmented_attention(q, k, v, *caches, block_table, prior, 128)
    return out, jax_ops.write_kv_cache(k, v, *caches, slots)


keys = jax.random.split(jax.random.key(0), 3)
q, k, v = (jax.random.normal(key, (n, 256, 64)) for key, n in zip(keys, (4, 2, 2), strict=True))
caches = jnp.zeros((16, 2, 32, 64)), jnp.zeros((16, 2, 32, 64))
block_table = jnp.arange(8, dtype=jnp.int32)[::-1]

jitted = jax.jit(step)
outs = []
for prior in (0, 128):
    rows = slice(prior, prior + 128)
    position = jnp.arange(prior, prior + 128)
    slots = (block_table[position // 32] * 32 + position % 32).astype(jnp.int32)
    out, caches = jitted(q[:, rows], k[:, rows], v[:, rows], caches, slots, jnp.int32(prior))
    outs.append(out)

nothing = np.zeros((0, 2, 32, 64)), np.zeros((0, 2, 32, 64)), np.zeros(0, np.int32)
q_, k_, v_ = (np.asarray(each) for each in (q, k, v))
expected = reference.segmented_attention(q_, k_, v_, *nothing, 0, 256)
error = float(np.abs(np.concatenate(outs, axis=1) - expected).max())
print(f"256 tokens in two jitted chunks, largest error against float64: {error:.1e}")
