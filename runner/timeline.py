"""The steps of a run as a Perfetto trace and as one self-contained HTML page.

Input is the JSON of `segattn generate --json`. The trace is Chrome's trace event format, which
https://ui.perfetto.dev and chrome://tracing open as it is: one row for the steps, one per request,
and counters of padding, queues and cache. Times are the host's.
"""

import html
import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from string import Template
from typing import Any

from ..reference.outputs import OutputFile
from .report_file import read_report
from .step import Step

_PROCESS = 1
_STEPS_THREAD = 0
"""Row of the steps; request rows follow."""


def add_arguments(parser: ArgumentParser) -> None:
    """The report and what to write."""
    parser.add_argument("report", type=Path, help="output of `segattn generate --json`")
    parser.add_argument("--perfetto", type=Path, help="trace file to write")
    parser.add_argument("--html", type=Path, help="page to write")


def run(options: Namespace) -> int:
    """Write the files; with --json print the totals."""
    if options.perfetto is None and options.html is None and not options.json:
        raise ValueError("nothing to write: give --perfetto FILE, --html FILE, --json or several")
    perfetto = OutputFile(options.perfetto) if options.perfetto else None
    html_file = OutputFile(options.html) if options.html else None
    steps = read_report(options.report).steps
    if perfetto:
        perfetto.save_json({"traceEvents": list(trace_events(steps))})
    if html_file:
        html_file.save(html_page(steps))
    if options.json:
        totals = {"num_tokens": 0, "num_tokens_padded": 0, "duration_seconds": 0}
        sums = {name: sum(getattr(step, name) for step in steps) for name in totals}
        print(json.dumps({"num_steps": len(steps), **sums}))
    return 0


def trace_events(steps: Sequence[Step]) -> Iterator[dict[str, Any]]:
    """Events of Chrome's trace event format; times are in microseconds."""
    request_ids = list(dict.fromkeys(i for step in steps for i in step.request_ids))
    threads = {request_id: thread for thread, request_id in enumerate(request_ids, 1)}
    names = {_STEPS_THREAD: "steps"} | {t: f"request {i}" for i, t in threads.items()}
    for thread, name in names.items():
        yield _event("M", "thread_name", thread, args={"name": name})
    for step in steps:
        start, duration = 1e6 * step.start_seconds, 1e6 * step.duration_seconds
        facts = {
            "state": step.state,
            "tokens": step.num_tokens,
            "padded tokens": step.num_tokens_padded,
            "tokens in cache": step.num_prior_tokens,
        }
        for thread in (_STEPS_THREAD, *(threads[i] for i in step.request_ids)):
            yield _event("X", step.graph, thread, ts=start, dur=duration, args=facts)
        counters = {
            "padding": step.num_tokens_padded - step.num_tokens,
            "running requests": step.num_running,
            "waiting requests": step.num_waiting,
            "KV cache usage": step.kv_cache_usage,
        }
        for name, value in counters.items():
            yield _event("C", name, _STEPS_THREAD, ts=start, args={"value": value})


def _event(phase: str, name: str, thread: int, **fields: Any) -> dict[str, Any]:
    return {"ph": phase, "name": name, "pid": _PROCESS, "tid": thread, **fields}


_PAGE = Template("""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>segattn timeline</title>
<style>
  body { font: 14px/1.4 system-ui, sans-serif; margin: 2em; color: #222; }
  svg { width: 100%; height: auto; font: 11px system-ui, sans-serif; }
  .prefill { fill: #d9822b; } .segmented_prefill { fill: #a8561a; } .decode { fill: #2b7bd9; }
  .padding { fill: #bbb; }
  table { border-collapse: collapse; } td, th { padding: 2px 10px; text-align: right; }
</style>
<h1>Timeline of $num_steps steps</h1>
<p>$real tokens were computed in $padded padded rows ($waste % padding). Width is host time; hover
over a bar for its step. Grey is the padded share of a step.</p>
<p><svg viewBox="0 0 1000 18"><rect class="prefill" width="12" height="12"/>
<text x="16" y="10">prefill</text><rect class="segmented_prefill" x="80" width="12" height="12"/>
<text x="96" y="10">prefill behind cached tokens</text>
<rect class="decode" x="270" width="12" height="12"/><text x="286" y="10">decode</text></svg></p>
<svg viewBox="0 0 1000 $height">
$rows
</svg>
<table><tr><th>step<th>graph<th>requests<th>tokens<th>padded<th>ms</tr>
$table
</table></html>
""")

_LABEL_WIDTH = 110
_ROW_HEIGHT = 22
_BAR_HEIGHT = 18


def html_page(steps: Sequence[Step]) -> str:
    """A page without any outside resource: rows of requests over time, and the list of steps."""
    request_ids = list(dict.fromkeys(i for step in steps for i in step.request_ids))
    end = max((s.start_seconds + s.duration_seconds for s in steps), default=1.0)
    begin = min((s.start_seconds for s in steps), default=0.0)
    scale = (1000 - _LABEL_WIDTH) / ((end - begin) or 1.0)
    rows = []
    for row, name in enumerate(["steps", *request_ids]):
        label = html.escape(name if row == 0 else f"request {name}")
        rows.append(f'<text x="0" y="{row * _ROW_HEIGHT + 13}">{label}</text>')
        for step in steps:
            if row == 0 or name in step.request_ids:
                rows += _bars(step, row, _LABEL_WIDTH + scale * (step.start_seconds - begin), scale)
    real = sum(step.num_tokens for step in steps)
    padded = sum(step.num_tokens_padded for step in steps)
    return _PAGE.substitute(
        num_steps=len(steps),
        real=real,
        padded=padded,
        waste=round(100 * (padded - real) / padded) if padded else 0,
        height=_ROW_HEIGHT * (1 + len(request_ids)),
        rows="\n".join(rows),
        table="\n".join(_table_row(step) for step in steps),
    )


def _bars(step: Step, row: int, x: float, scale: float) -> list[str]:
    """The bar of a step in one row, its padded share grey from the top."""
    top, width = row * _ROW_HEIGHT, max(scale * step.duration_seconds, 0.5)
    grey = _BAR_HEIGHT * max(0.0, 1 - step.num_tokens / max(step.num_tokens_padded, 1))
    kinds = ("segmented_prefill", "prefill")
    kind = next((kind for kind in kinds if step.graph.startswith(kind)), "decode")
    title = html.escape(
        f"step {step.index}: {step.graph}, {step.num_tokens} of {step.num_tokens_padded} tokens"
    )
    box = f'x="{x:.2f}" width="{width:.2f}"'
    return [
        f'<g><title>{title}</title><rect class="{kind}" {box} y="{top}" height="{_BAR_HEIGHT}"/>'
        f'<rect class="padding" {box} y="{top}" height="{grey:.2f}"/></g>'
    ]


def _table_row(step: Step) -> str:
    cells = (
        step.index,
        step.graph,
        " ".join(step.request_ids),
        step.num_tokens,
        step.num_tokens_padded,
        f"{1000 * step.duration_seconds:.1f}",
    )
    return "<tr>" + "".join(f"<td>{html.escape(str(cell))}" for cell in cells) + "</tr>"
