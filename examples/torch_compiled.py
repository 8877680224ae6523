"""torch.compile with the operators in one full graph that serves every length."""

import torch

import segattn.kernels.torch_ops  # noqa: F401  registers torch.ops.segattn

torch.manual_seed(0)
projection = torch.randn(64, 3 * 4 * 32) / 8  # one layer, 4 heads of 32
k_cache, v_cache = torch.zeros(2, 8, 4, 16, 32)
block_table = torch.tensor([6, 1, 3, 0], dtype=torch.int32)


def layer(
    hidden: torch.Tensor, slots: torch.Tensor, prior_tokens: torch.Tensor, num_tokens: torch.Tensor
) -> torch.Tensor:
    """Attention of a chunk [128, 64], whose keys and values are stored first."""
    q, k, v = (hidden @ projection).reshape(128, 3, 4, 32).permute(1, 2, 0, 3).contiguous()
    torch.ops.segattn.write_kv_cache(k, v, k_cache, v_cache, slots)
    return torch.ops.segattn.segmented_attention(
        q, k, v, k_cache, v_cache, block_table, prior_tokens, num_tokens
    )


compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
hidden = torch.randn(60, 64)


def prefill(chunks: list[int]) -> torch.Tensor:
    """Attention of 60 tokens that come in chunks of these lengths."""
    outs, prior = [], 0
    for count in chunks:
        rows = torch.zeros(128, 64)
        rows[:count] = hidden[prior : prior + count]
        slots = torch.full((128,), -1, dtype=torch.int32)
        position = torch.arange(prior, prior + count)
        slots[:count] = block_table[position // 16] * 16 + (position % 16).to(torch.int32)
        lengths = torch.tensor([[[prior]], [[count]]], dtype=torch.int32)
        outs.append(compiled(rows, slots, *lengths)[:, :count])
        prior += count
    return torch.cat(outs, dim=1)


error = float((prefill([60]) - prefill([25, 3, 32])).abs().max())
print(f"60 tokens at once and in three chunks differ by at most {error:.1e}")
