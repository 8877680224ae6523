"""The planner against all bucket lists there are, and `segattn buckets` on a hand-made report."""

import json
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segattn.reference.paging import attention_rows
from segattn.runner.bucket_planner import Rows, evaluate, plan_buckets
from segattn.tests.command import segattn
from segattn.tests.runner.steps import DECODE, report_of, step


def identity(bucket: int) -> int:
    """Rows of a decode bucket."""
    return bucket


def tens(bucket: int) -> int:
    """Rows in tiles of ten, as a small picture of tiles of 128."""
    return -(-bucket // 10) * 10


@given(
    sizes=st.dictionaries(st.integers(1, 12), st.integers(1, 9), max_size=6),
    num_buckets=st.integers(1, 4),
    rows=st.sampled_from([identity, tens]),
)
def test_no_list_of_that_length_costs_less(
    sizes: dict[int, int], num_buckets: int, rows: Rows
) -> None:
    lists = [
        [*chosen, 12]
        for length in range(num_buckets)
        for chosen in combinations(range(1, 12), length)
    ]
    cheapest = min(evaluate(buckets, sizes, rows).num_rows for buckets in lists)
    plan = plan_buckets(sizes, 12, num_buckets, rows)
    assert plan.num_rows == cheapest
    assert len(plan.buckets) <= num_buckets
    assert plan.buckets[-1] == 12
    assert list(plan.buckets) == sorted(set(plan.buckets))


def test_a_bucket_is_as_large_as_its_rows_allow() -> None:
    plan = plan_buckets({100: 5, 300: 1}, 512, 2, attention_rows)
    # 100 tokens cost 128 rows: the bucket 128 takes larger chunks at the same price.
    assert plan.buckets == (128, 512)
    assert plan.num_rows == 5 * 128 + 512
    assert plan.waste == pytest.approx(1 - 800 / 1152)


def test_fewer_buckets_are_used_when_more_save_nothing() -> None:
    assert plan_buckets({4: 10}, 4, 3, identity).buckets == (4,)


def test_no_work_wastes_nothing() -> None:
    assert plan_buckets({}, 8, 2, identity).waste == 0.0


def test_sizes_beyond_the_largest_and_no_buckets_are_refused() -> None:
    with pytest.raises(ValueError, match=r"size=9: must be within 1\.\.8"):
        plan_buckets({9: 1}, 8, 2, identity)
    with pytest.raises(ValueError, match="num_buckets=0: must be at least 1"):
        plan_buckets({8: 1}, 8, 0, identity)


def write_report(path: Path, prefill_buckets: list[int]) -> Path:
    """A report of two prefills, of 100 and 300 tokens, and a decode of two requests."""
    steps = [step(), step(num_tokens=300, num_tokens_padded=512), DECODE]
    path.write_text(json.dumps(report_of(steps, prefill_buckets)))
    return path


def test_the_command_prints_the_list_in_use_and_the_best_ones(tmp_path: Path) -> None:
    result = segattn("buckets", write_report(tmp_path / "r.json", [128, 512]))
    assert (result.status, result.err) == (0, "")
    lines = [" ".join(line.split()) for line in result.out.splitlines()]
    assert lines == [
        "tokens per prefill step: 2 steps, --num-batched-tokens-buckets",
        "in use 128,512 640 rows, 37.5% padding",
        "best 1 512 1024 rows, 60.9% padding",
        "best 2 128,512 640 rows, 37.5% padding",
        "best 3 128,384,512 512 rows, 21.9% padding",
        "requests per decode step: 1 steps, --num-seqs-buckets",
        "in use 1,4 4 rows, 50.0% padding",
        "best 1 4 4 rows, 50.0% padding",
        "best 2 2,4 2 rows, 0.0% padding",
    ]


def test_reports_with_other_buckets_are_not_mixed(tmp_path: Path) -> None:
    first = write_report(tmp_path / "a.json", [128, 512])
    second = write_report(tmp_path / "b.json", [512])
    result = segattn("buckets", first, second)
    assert result.status == 2
    assert "error: reports have different prefill_buckets" in result.err


@pytest.mark.parametrize("content", ["{}", '{"steps": []}', '{"steps": [], "config": {}}'])
def test_a_file_that_is_no_report_is_one_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    result = segattn("buckets", path)
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith(f"error: {path}")


def test_a_plan_for_no_buckets_is_refused(tmp_path: Path) -> None:
    result = segattn("buckets", write_report(tmp_path / "a.json", [128, 512]), "--max-buckets", "0")
    assert (result.status, result.out) == (2, "")
    assert "--max-buckets=0: must be at least 1" in result.err
