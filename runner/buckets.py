"""`segattn buckets`: plan bucket lists from the steps of recorded runs."""

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..reference.paging import attention_rows
from .bucket_planner import BucketPlan, Rows, evaluate, plan_buckets
from .cli import failure
from .timeline import read_steps


@dataclass(frozen=True)
class Phase:
    """One of the two bucket lists: what it is called, what it counts and what a bucket costs."""

    option: str
    meaning: str
    state: str
    used: str
    """Key of the resolved list in a report's config."""
    rows: Rows


PHASES = (
    Phase(
        option="--num-batched-tokens-buckets",
        meaning="tokens per prefill step",
        state="ACTIVE_PREFILL",
        used="prefill_buckets",
        rows=attention_rows,
    ),
    Phase(
        option="--num-seqs-buckets",
        meaning="requests per decode step",
        state="ACTIVE_DECODE",
        used="decode_buckets",
        rows=lambda bucket: bucket,
    ),
)


def main(argv: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="segattn buckets", description=__doc__)
    help_ = "output of `segattn generate --json`; several must have the same buckets"
    parser.add_argument("reports", type=Path, nargs="+", metavar="REPORT", help=help_)
    parser.add_argument("--max-buckets", type=int, default=4, help="plan for 1 to this many")
    options = parser.parse_args(argv)
    if options.max_buckets < 1:
        parser.error(f"--max-buckets={options.max_buckets}: must be at least 1")
    try:
        for phase in PHASES:
            used, sizes = read_sizes(options.reports, phase)
            print("\n".join(describe(phase, used, sizes, options.max_buckets)))
    except (OSError, ValueError) as error:
        return failure(str(error))
    return 0


def read_sizes(reports: Sequence[Path], phase: Phase) -> tuple[list[int], Counter[int]]:
    """The bucket list that the reports used, and how often each size occurred in their steps.

    ValueError for a file that is no report and for reports with different lists.
    """
    lists: dict[str, list[int]] = {}
    sizes: Counter[int] = Counter()
    for report in reports:
        try:
            steps = read_steps(report)
        except ValueError as error:
            raise ValueError(f"report {str(report)!r}: {error}") from error
        try:
            config = json.loads(report.read_text(encoding="utf-8"))["config"]
            lists[str(report)] = [int(bucket) for bucket in config[phase.used]]
        except (KeyError, TypeError) as error:
            raise ValueError(f"report {str(report)!r}: config.{phase.used} is missing") from error
        sizes.update(step.num_tokens for step in steps if step.state == phase.state)
    first = next(iter(lists.values()))
    if any(other != first for other in lists.values()):
        raise ValueError(f"reports have different {phase.used}: {lists}")
    return first, sizes


def describe(
    phase: Phase, used: Sequence[int], sizes: Mapping[int, int], max_buckets: int
) -> Iterator[str]:
    """Lines on one phase: the list in use, then the best list for each number of buckets."""
    yield f"{phase.meaning}: {sum(sizes.values())} steps, {phase.option}"
    yield _line("in use", evaluate(used, sizes, phase.rows))
    previous: BucketPlan | None = None
    for num_buckets in range(1, max_buckets + 1):
        plan = plan_buckets(sizes, used[-1], num_buckets, phase.rows)
        if plan == previous:
            break  # more buckets save nothing
        yield _line(f"best {num_buckets}", plan)
        previous = plan


def _line(name: str, plan: BucketPlan) -> str:
    buckets = ",".join(map(str, plan.buckets))
    return f"  {name:<7} {buckets:<24} {plan.num_rows:>8} rows, {plan.waste:6.1%} padding"
