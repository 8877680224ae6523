"""What `segattn generate` prints: text with a table of steps, or JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ..reference.extras import MissingExtraError
from ..scheduler import SchedulerConfig
from .compile_plan import GraphShape
from .plain_forward import Comparison
from .serving import PromptResult
from .step import Step

try:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError as error:
    raise MissingExtraError("rich", "cli") from error


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


def print_json(report: GenerationReport) -> None:
    """One JSON object on stdout."""
    print(json.dumps(asdict(report), indent=2))


def print_text(report: GenerationReport) -> None:
    """Texts, the table of steps, and a line of totals on stdout."""
    console = Console(highlight=False, soft_wrap=True)
    for result in report.requests:
        if result.error is None:
            text = Text(result.prompt, style="bold")
            console.print(text.append(result.text, style="not bold"), end="\n\n")
    if report.steps:
        console.print(_step_table(report.steps))
        console.print(_totals(report))
    if report.check is not None:
        console.print(_check_line(report.check, report.dtype))


def _step_table(steps: Sequence[Step]) -> Table:
    table = Table(title="Steps", title_justify="left")
    table.add_column("step", justify="right")
    table.add_column("state", no_wrap=True)
    table.add_column("requests")
    table.add_column("tokens", justify="right")
    table.add_column("padded", justify="right")
    table.add_column("bucket", no_wrap=True)
    for step in steps:
        table.add_row(
            str(step.index),
            step.state,
            " ".join(step.request_ids),
            str(step.num_tokens),
            str(step.num_tokens_padded),
            step.graph,
        )
    return table


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
