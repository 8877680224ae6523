"""The plan of writing keys into a pre-transposed cache."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from segattn.kernels.plan.key_writes import key_write_plan
from segattn.tests.kernels.cases import block_sizes, seeds


@given(
    seed=seeds,
    num_tokens=st.integers(1, 400),
    block_size=block_sizes,
    first=st.integers(0, 300),
    shuffled=st.booleans(),
    padding=st.floats(0, 1),
)
def test_every_token_is_planned_once_and_whole_blocks_are_whole(
    seed: int, num_tokens: int, block_size: int, first: int, shuffled: bool, padding: float
) -> None:
    rng = np.random.default_rng(seed)
    slots = np.arange(first, first + num_tokens, dtype=np.int32)
    if shuffled:
        slots = rng.permutation(2 * num_tokens)[:num_tokens].astype(np.int32)
    slots[rng.random(num_tokens) < padding * 0.3] = -1
    plan = key_write_plan(slots, block_size)
    found: dict[int, int] = {}
    runs = plan.tokens.reshape(-1, block_size)
    for block, run in zip(plan.blocks.ravel(), runs, strict=True):
        if block == -1:
            assert (run == -1).all()
            continue
        for offset, token in enumerate(run):
            assert slots[token] == block * block_size + offset
            found[int(token)] = int(slots[token])
    count = int(plan.num_rest[0, 0])
    assert (plan.rest[:, count:] == -1).all()
    found |= dict(zip(*plan.rest[:, :count].tolist(), strict=True))
    expected = {token: int(slot) for token, slot in enumerate(slots) if slot != -1}
    assert found == expected
    assert len(expected) == (plan.blocks != -1).sum() * block_size + count
    # A block that is written as a whole leaves no single token.
    blocks, counts = np.unique(slots[slots != -1] // block_size, return_counts=True)
    assert (plan.blocks != -1).sum() == (counts == block_size).sum()
    assert set(plan.blocks[plan.blocks != -1]) == set(blocks[counts == block_size])
