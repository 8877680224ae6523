"""Workloads: the FLOPs and bytes they claim, and arguments that the reference accepts."""

import numpy as np
import pytest

from segattn.benchmarks.kernels.documented import DOCUMENTED
from segattn.benchmarks.kernels.targets import TARGETS
from segattn.benchmarks.kernels.workloads import CacheWrite, Decode, KeyColumns, Prefill, Workload
from segattn.reference import attention as reference

SMALL: tuple[Workload, ...] = (
    Prefill(128, 40, q_heads=2, head_dim=16, block_size=16),
    Prefill(128, 48, q_heads=2, kv_heads=2, head_dim=16, block_size=16, num_tokens=70),
    Prefill(128, 0, q_heads=2, head_dim=16, block_size=16),
    Prefill(128, 0, q_heads=2, head_dim=16, block_size=16, num_tokens=70),
    Decode(3, 40, q_heads=4, kv_heads=2, head_dim=16, block_size=16),
    CacheWrite(70, kv_heads=2, head_dim=16, block_size=16),
    CacheWrite(70, kv_heads=2, head_dim=16, block_size=16, first=8),
    Prefill(128, 40, q_heads=4, kv_heads=2, head_dim=16, block_size=16, window=20),
    Prefill(128, 40, q_heads=4, kv_heads=2, head_dim=16, block_size=16, fp8=True),
    KeyColumns(Decode(3, 40, q_heads=4, kv_heads=2, head_dim=16, block_size=16)),
)


@pytest.mark.parametrize("workload", SMALL, ids=[w.label for w in SMALL])
def test_the_reference_accepts_the_arguments_and_reads_no_nan(workload: Workload) -> None:
    arguments = workload.arguments(np.random.default_rng(1))
    result = getattr(reference, workload.kernel)(**arguments)
    first = result[0] if isinstance(result, tuple) else result
    assert not np.isnan(np.asarray(first, np.float64)).any()


def test_flops_count_the_visible_pairs() -> None:
    work = Prefill(128, 10, q_heads=3, head_dim=64, num_tokens=5)
    pairs = sum(10 + i + 1 for i in range(5))
    assert work.model_flops == 3 * pairs * 2 * 2 * 64
    windowed = Prefill(128, 10, q_heads=3, head_dim=64, num_tokens=5, window=12)
    assert windowed.model_flops == 3 * (11 + 12 + 12 + 12 + 12) * 2 * 2 * 64
    assert Decode(2, 7, q_heads=4, head_dim=64).model_flops == 2 * 4 * 7 * 2 * 2 * 64


def test_bytes_count_each_needed_row_once() -> None:
    row = 64 * 2
    work = Prefill(128, 10, q_heads=3, kv_heads=1, head_dim=64, num_tokens=5)
    assert work.model_bytes == row * (2 * 3 * 5 + 2 * (10 + 5))
    windowed = Prefill(128, 10, q_heads=3, kv_heads=1, head_dim=64, num_tokens=5, window=4)
    assert windowed.model_bytes == row * (2 * 3 * 5 + 2 * (3 + 5))
    fp8 = Prefill(128, 10, q_heads=3, kv_heads=1, head_dim=64, num_tokens=5, fp8=True)
    assert fp8.model_bytes == row * (2 * 3 * 5 + 2 * (10 / 2 + 5))
    first = Prefill(128, 0, q_heads=3, kv_heads=1, head_dim=64, num_tokens=5)
    assert first.model_bytes == row * (2 * 3 * 5 + 2 * 5 + 2 * 5)
    assert Decode(2, 7, 4, 1, 64).model_bytes == row * 2 * (2 * 4 + 2 * 7)
    assert CacheWrite(7, 2, 64).model_bytes == row * 4 * 2 * 7


def test_every_row_has_a_label_of_its_own() -> None:
    labels = [target.workload.label for target in TARGETS]
    labels += [workload.label for workload in DOCUMENTED]
    assert len(set(labels)) == len(labels)
