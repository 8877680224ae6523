"""The steps of a run as a Perfetto trace and as one self-contained HTML page.

Input is the JSON of `segattn generate --json`. The trace is Chrome's trace event format, which
https://ui.perfetto.dev and chrome://tracing open as it is: one row for the host, which schedules
and pads each step, one for the graphs, one per request, and counters of padding, queues and cache.
With async_scheduling the host prepares a step while the graph before it runs. Times are the host's.
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
_HOST_ROW, _GRAPHS_ROW, _FIRST_REQUEST_ROW = 0, 1, 2


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
        totals = {"num_tokens": 0, "num_tokens_padded": 0, "run_seconds": 0}
        sums = {name: sum(getattr(step, name) for step in steps) for name in totals}
        print(json.dumps({"num_steps": len(steps), **sums}))
    return 0


def trace_events(steps: Sequence[Step]) -> Iterator[dict[str, Any]]:
    """Events of Chrome's trace event format; times are in microseconds."""
    names = _row_names(steps)
    for row, name in enumerate(names):
        yield _event("M", "thread_name", row, args={"name": name})
    for step in steps:
        facts = {
            "state": step.state,
            "tokens": step.num_tokens,
            "padded tokens": step.num_tokens_padded,
            "tokens in cache": step.num_prior_tokens,
        }
        for row, start, duration in _slices(step, names):
            yield _event("X", step.graph, row, ts=1e6 * start, dur=1e6 * duration, args=facts)
        counters = {
            "padding": step.num_tokens_padded - step.num_tokens,
            "running requests": step.num_running,
            "waiting requests": step.num_waiting,
            "KV cache usage": step.kv_cache_usage,
        }
        begin = 1e6 * step.run_start_seconds
        for name, value in counters.items():
            yield _event("C", name, _GRAPHS_ROW, ts=begin, args={"value": value})


def _row_names(steps: Sequence[Step]) -> list[str]:
    request_ids = dict.fromkeys(i for step in steps for i in step.request_ids)
    return ["host", "graphs", *(f"request {i}" for i in request_ids)]


def _slices(step: Step, names: Sequence[str]) -> Iterator[tuple[int, float, float]]:
    """(row, start, duration) in seconds of everything that a step occupies."""
    yield _HOST_ROW, step.start_seconds, step.prepare_seconds
    requests = {f"request {i}" for i in step.request_ids}
    for row, name in enumerate(names):
        if row == _GRAPHS_ROW or (row >= _FIRST_REQUEST_ROW and name in requests):
            yield row, step.run_start_seconds, step.run_seconds


def _event(phase: str, name: str, thread: int, **fields: Any) -> dict[str, Any]:
    return {"ph": phase, "name": name, "pid": _PROCESS, "tid": thread, **fields}


_PAGE = Template("""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>segattn timeline</title>
<style>
  body { font: 14px/1.4 system-ui, sans-serif; margin: 2em; color: #222; }
  svg { width: 100%; height: auto; font: 11px system-ui, sans-serif; }
  .prefill { fill: #d9822b; } .segmented_prefill { fill: #a8561a; } .decode { fill: #2b7bd9; }
  .padding { fill: #bbb; } .host { fill: #5a9e6f; }
  table { border-collapse: collapse; } td, th { padding: 2px 10px; text-align: right; }
</style>
<h1>Timeline of $num_steps steps</h1>
<p>$real tokens were computed in $padded padded rows ($waste % padding). Width is host time; hover
over a bar for its step. Grey is the padded share of a step.</p>
<p><svg viewBox="0 0 1000 18"><rect class="prefill" width="12" height="12"/>
<text x="16" y="10">prefill</text><rect class="segmented_prefill" x="80" width="12" height="12"/>
<text x="96" y="10">prefill behind cached tokens</text>
<rect class="decode" x="270" width="12" height="12"/><text x="286" y="10">decode</text>
<rect class="host" x="350" width="12" height="12"/>
<text x="366" y="10">host: schedule and pad</text>
</svg></p>
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
    names = _row_names(steps)
    end = max((s.run_start_seconds + s.run_seconds for s in steps), default=1.0)
    begin = min((s.start_seconds for s in steps), default=0.0)
    scale = (1000 - _LABEL_WIDTH) / ((end - begin) or 1.0)
    rows = [
        f'<text x="0" y="{row * _ROW_HEIGHT + 13}">{html.escape(name)}</text>'
        for row, name in enumerate(names)
    ]
    for step in steps:
        for row, start, duration in _slices(step, names):
            box = (_LABEL_WIDTH + scale * (start - begin), max(scale * duration, 0.5))
            rows.append(_bar(step, row, *box))
    real = sum(step.num_tokens for step in steps)
    padded = sum(step.num_tokens_padded for step in steps)
    return _PAGE.substitute(
        num_steps=len(steps),
        real=real,
        padded=padded,
        waste=round(100 * (padded - real) / padded) if padded else 0,
        height=_ROW_HEIGHT * len(names),
        rows="\n".join(rows),
        table="\n".join(_table_row(step) for step in steps),
    )


def _bar(step: Step, row: int, x: float, width: float) -> str:
    """The bar of a step in one row; that of a graph has its padded share grey from the top."""
    top = row * _ROW_HEIGHT
    is_host = row == _HOST_ROW
    share = max(0.0, 1 - step.num_tokens / max(step.num_tokens_padded, 1))
    grey = 0.0 if is_host else _BAR_HEIGHT * share
    kinds = ("segmented_prefill", "prefill")
    kind = next((kind for kind in kinds if step.graph.startswith(kind)), "decode")
    title = html.escape(
        f"step {step.index}: {step.graph}, {step.num_tokens} of {step.num_tokens_padded} tokens"
    )
    box = f'x="{x:.2f}" width="{width:.2f}" y="{top}"'
    return (
        f'<g><title>{title}</title><rect class="{"host" if is_host else kind}" {box} '
        f'height="{_BAR_HEIGHT}"/><rect class="padding" {box} height="{grey:.2f}"/></g>'
    )


def _table_row(step: Step) -> str:
    cells = (
        step.index,
        step.graph,
        " ".join(step.request_ids),
        step.num_tokens,
        step.num_tokens_padded,
        f"{1000 * step.run_seconds:.1f}",
    )
    return "<tr>" + "".join(f"<td>{html.escape(str(cell))}" for cell in cells) + "</tr>"
