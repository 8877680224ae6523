"""What `segattn generate` prints: text with a table of steps, or JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..reference.terminal import columns, printable, table
from ..scheduler import SchedulerConfig
from .compile_plan import GraphShape
from .plain_forward import Comparison
from .serving import PromptResult
from .step import Step

FORMAT = "segattn generate 1"
"""Tells a report from other JSON, and its fields from those of other releases."""


@dataclass(frozen=True)
class GenerationReport:
    """Everything that a run of `generate` has to tell."""

    model: str
    dtype: str
    backend: str
    """What executed the kernels."""
    config: SchedulerConfig
    requests: Sequence[PromptResult]
    steps: Sequence[Step]
    compile_plan: Sequence[GraphShape]
    check: Comparison | None


def to_json(report: GenerationReport) -> dict[str, Any]:
    """Plain values, which `segattn timeline` and `segattn buckets` read again."""
    return {"format": FORMAT, **asdict(report)}


def print_json(report: GenerationReport) -> None:
    """One JSON object on stdout."""
    print(json.dumps(to_json(report), indent=2))


def print_text(report: GenerationReport, *, wide: bool = False) -> None:
    """Texts, the table of steps, and a line of totals on stdout."""
    for result in report.requests:
        if result.error is None:
            print(printable(result.prompt + result.text, "\n\t"), end="\n\n")
    if report.steps:
        print(_step_table(report.steps, wide))
        print(_totals(report))
    if report.check is not None:
        print(_check_line(report.check, report.dtype))


def _step_table(steps: Sequence[Step], wide: bool) -> str:
    heads = columns(
        ">step", "state", "requests", ">tokens", ">padded", "bucket", "+>in cache", "+>ms"
    )
    rows = [
        (
            step.index,
            step.state.removeprefix("ACTIVE_").lower(),
            " ".join(step.request_ids),
            step.num_tokens,
            step.num_tokens_padded,
            step.graph,
            step.num_prior_tokens,
            f"{1e3 * step.run_seconds:.1f}",
        )
        for step in steps
    ]
    return table("Steps", heads, rows, wide=wide)


def _totals(report: GenerationReport) -> str:
    real = sum(step.num_tokens for step in report.steps)
    padded = sum(step.num_tokens_padded for step in report.steps)
    return (
        f"{len(report.steps)} steps, {real} tokens computed in {padded} padded rows, "
        f"{len(report.compile_plan)} graphs in the compile plan, {report.dtype} "
        f"on the {report.backend} backend"
    )


def _check_line(check: Comparison, dtype: str) -> str:
    verdict = "agree" if check.tokens_agree else "DIFFER"
    return (
        f"check: {check.num_tokens} {dtype} tokens {verdict} with the plain float32 forward pass; "
        f"largest logit difference {check.max_logit_difference:.3g}, "
        f"smallest top-2 margin {check.min_top2_margin:.3g}"
    )
