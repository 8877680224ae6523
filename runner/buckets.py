"""Plan bucket lists from the steps of recorded runs."""

import json
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..reference.paging import attention_rows
from .bucket_planner import BucketPlan, Rows, evaluate, plan_buckets
from .report_file import Report, read_report


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


def add_arguments(parser: ArgumentParser) -> None:
    """Reports, and how many buckets to plan for."""
    help_ = "output of `segattn generate --json`; several must have the same buckets"
    parser.add_argument("reports", type=Path, nargs="+", metavar="REPORT", help=help_)
    parser.add_argument("--max-buckets", type=int, default=4, help="plan for 1 to this many (4)")


def run(options: Namespace) -> int:
    """Print the list in use and the best ones."""
    if options.max_buckets < 1:
        options.parser.error(f"--max-buckets={options.max_buckets}: must be at least 1")
    reports = {str(path): read_report(path) for path in options.reports}
    for phase in PHASES:
        used, sizes = sizes_of(reports, phase)
        plans = best_plans(phase, used, sizes, options.max_buckets)
        if options.json:
            print(json.dumps({"option": phase.option, "plans": {k: asdict(p) for k, p in plans}}))
            continue
        print(f"{phase.meaning}: {sum(sizes.values())} steps, {phase.option}")
        for name, plan in plans:
            buckets = ",".join(map(str, plan.buckets))
            print(f"  {name:<7} {buckets:<24} {plan.num_rows:>8} rows, {plan.waste:6.1%} padding")
    return 0


def sizes_of(reports: Mapping[str, Report], phase: Phase) -> tuple[list[int], Counter[int]]:
    """The bucket list that the reports used, and how often each size occurred in their steps.

    ValueError for reports with different lists, and for a step beyond its list.
    """
    lists: dict[str, list[int]] = {name: getattr(r, phase.used) for name, r in reports.items()}
    first = next(iter(lists.values()))
    if any(other != first for other in lists.values()):
        raise ValueError(f"reports have different {phase.used}: {lists}")
    sizes: Counter[int] = Counter()
    for name, report in reports.items():
        for number, step in enumerate(report.steps):
            if step.state != phase.state:
                continue
            if not 1 <= step.num_tokens <= first[-1]:
                raise ValueError(
                    f"{name}: steps[{number}].num_tokens={step.num_tokens}: must be within "
                    f"1..{first[-1]}, the largest of {phase.used}"
                )
            sizes[step.num_tokens] += 1
    return first, sizes


def best_plans(
    phase: Phase, used: Sequence[int], sizes: Mapping[int, int], max_buckets: int
) -> Iterator[tuple[str, BucketPlan]]:
    """The list in use, then the best list for each number of buckets."""
    yield "in use", evaluate(used, sizes, phase.rows)
    previous: BucketPlan | None = None
    for num_buckets in range(1, max_buckets + 1):
        plan = plan_buckets(sizes, used[-1], num_buckets, phase.rows)
        if plan == previous:
            break  # more buckets save nothing
        yield f"best {num_buckets}", plan
        previous = plan
