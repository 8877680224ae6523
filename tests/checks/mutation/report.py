"""The record of a mutation run: who noticed how many mutants, and what is known of the others."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from segattn.tests.checks.mutation.cases import STAGES

SURVIVED = "survived"

INTRODUCTION = """# Mutations of scheduler and runner

`python -m segattn.tests.checks.mutation --out FOLDER`, run from the repository's root, puts one
fault at a time into `scheduler/` and into the runner's `engine.py`, `model_runner.py` and
`padding.py` (a comparison, an operator, a number, a truth value, `and`/`or`,
`not`, or one statement removed) and sees who notices. Each mutant is imported in a process of its
own and judged by the cases that execute its line, the fast ones first: recorded traces of vLLM,
runs of the fuzzer, unit tests, tests that fail every inner call, explorations of small
configurations. One that never ends counts as noticed. A run can be stopped and continued,
`--again` judges the unexplained survivors once more, and `--report docs/mutations.md` writes this
page.

Not mutated are `decode_node.py` and the scheduler's `vllm_*.py`, whose tests need vLLM, an
environment of their own, and take minutes each (`make test-vllm`).
"""

SURVIVORS = """
## Survivors

A mutant that no case notices is either a missing test, which is then written, or equal to the
original in everything that a caller can see. Why each of these is equal; "open" is not settled:

| file | function | change | reason |
|---|---|---|---|
"""


def load_reasons(path: Path) -> dict[tuple[str, str, str], str]:
    """Reasons why mutants survive, by file, function and change."""
    return {
        (entry["file"], entry["function"], change): group["reason"]
        for group in json.loads(path.read_text())
        for entry in group["mutants"]
        for change in entry["changes"]
    }


def place_of(verdict: Mapping[str, Any]) -> tuple[str, str, str]:
    """File, function and change that a verdict is about."""
    return verdict["file"], verdict["function"], verdict["change"]


def report(
    num_mutants: int,
    verdicts: Sequence[Mapping[str, Any]],
    reasons: Mapping[tuple[str, str, str], str],
) -> str:
    """Markdown page: counts per file and stage, and the survivors with their reasons."""
    stages = (*STAGES, SURVIVED)
    counts: dict[str, Counter[str]] = {}
    for verdict in verdicts:
        counts.setdefault(verdict["file"], Counter())[verdict["stage"]] += 1
    total = sum(counts.values(), Counter())
    loops = sum(verdict["case"].endswith("(no end)") for verdict in verdicts)
    killed = len(verdicts) - total[SURVIVED]
    lines = [
        INTRODUCTION,
        f"**{len(verdicts):,} of {num_mutants:,} mutants were judged: {killed:,} are noticed** "
        f"({loops} because they never end), {total[SURVIVED]} survive.",
        "",
        _row(("file", "mutants", *stages)),
        _row("---" for _ in range(len(stages) + 2)),
        *(_counts_row(name, counts[name], stages) for name in sorted(counts)),
        _counts_row("**all**", total, stages),
    ]
    survivors = Counter(place_of(found) for found in verdicts if found["stage"] == SURVIVED)
    rows = [
        _row(
            (
                file,
                f"`{function}`",
                f"`{_escape(change)}`" + (f" ({count} places)" if count > 1 else ""),
                reasons.get((file, function, change), "**open**"),
            )
        )
        for (file, function, change), count in sorted(survivors.items())
    ]
    return "\n".join(lines) + "\n" + SURVIVORS + "\n".join(rows) + "\n"


def _counts_row(name: str, counts: Counter[str], stages: Sequence[str]) -> str:
    return _row((name, str(counts.total()), *(str(counts[stage]) for stage in stages)))


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escape(change: str) -> str:
    return change.replace("|", "\\|").replace("`", "")
