"""torch operators: the cache is a tensor that write_kv_cache changes in place."""

import torch

import segattn.kernels.torch_ops  # noqa: F401  registers torch.ops.segattn
from segattn.reference import attention as reference

torch.manual_seed(0)
q, k, v = (torch.randn(heads, 128, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
k_cache, v_cache = torch.zeros(2, 8, 2, 32, 64, dtype=torch.bfloat16)
block_table = torch.tensor([5, 2, 7, 1], dtype=torch.int32)
position = torch.arange(40)  # 40 cached tokens; the chunk holds the next 60
slots = (block_table[position // 32] * 32 + position % 32).to(torch.int32)

ops = torch.ops.segattn
ops.write_kv_cache(k[:, 60:100], v[:, 60:100], k_cache, v_cache, slots)
out = ops.segmented_attention(q, k, v, k_cache, v_cache, block_table, 40, 60)

q_, k_, v_, k_rows, v_rows = (each.float().numpy() for each in (q, k, v, k_cache, v_cache))
expected = reference.segmented_attention(q_, k_, v_, k_rows, v_rows, block_table.numpy(), 40, 60)
difference = out.double() - torch.from_numpy(expected)
error = float(difference.norm() / torch.from_numpy(expected).norm())
print(f"40 cached tokens and a chunk of 60, relative error against float64: {error:.1e}")
