"""`segattn timeline`: trace events and page of hand-made steps."""

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from segattn.runner.timeline import html_page, trace_events
from segattn.tests.command import segattn
from segattn.tests.runner.steps import DECODE, report_of, step

STEPS = [step(), DECODE]


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """A report of two steps."""
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report_of(STEPS)))
    return path


def test_every_step_is_a_slice_of_its_own_row_and_of_each_request() -> None:
    events = list(trace_events(STEPS))
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {0: "host", 1: "graphs", 2: "request a", 3: "request <b>"}
    slices = [(e["name"], e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert slices == [
        ("prefill_s128", 0, 1e6, 0.125e6),
        ("prefill_s128", 1, 1.125e6, 0.5e6),
        ("prefill_s128", 2, 1.125e6, 0.5e6),
        ("decode_b4_w8", 0, 1.5e6, 0.125e6),
        ("decode_b4_w8", 1, 1.75e6, 0.25e6),
        ("decode_b4_w8", 2, 1.75e6, 0.25e6),
        ("decode_b4_w8", 3, 1.75e6, 0.25e6),
    ]
    # The host prepares the second step while the first one's graph runs.
    assert slices[3][2] < slices[1][2] + slices[1][3]


def test_counters_follow_padding_queues_and_cache() -> None:
    counters = [e for e in trace_events(STEPS) if e["ph"] == "C"]
    values = {(e["name"], e["ts"]): e["args"]["value"] for e in counters}
    assert values[("padding", 1.125e6)] == 28
    assert values[("padding", 1.75e6)] == 2
    assert values[("waiting requests", 1.125e6)] == 2
    assert values[("KV cache usage", 1.75e6)] == 0.5


class _Page(HTMLParser):
    """Collects the tags of a page and whatever it would load from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.outside += [str(value) for name, value in attrs if name in ("src", "href")]


def test_the_page_is_self_contained_and_escapes_request_ids() -> None:
    text = html_page(STEPS)
    page = _Page()
    page.feed(text)
    assert page.outside == []
    assert "script" not in page.tags
    assert "request &lt;b&gt;" in text
    assert "b" not in page.tags
    # 102 tokens in 132 rows.
    assert "102 tokens were computed in 132 padded rows (23 % padding)" in text
    # Rows of host, graphs, a and <b>: seven bars, each with a padded share, and the legend's 4.
    assert page.tags.count("rect") == 2 * 7 + 4


def test_a_page_of_no_steps_is_still_a_page() -> None:
    assert "Timeline of 0 steps" in html_page([])


def test_the_command_writes_both_files(report: Path, tmp_path: Path) -> None:
    trace, page = tmp_path / "trace.json", tmp_path / "page.html"
    result = segattn("timeline", report, "--perfetto", trace, "--html", page)
    assert (result.status, result.err) == (0, "")
    assert json.loads(trace.read_text())["traceEvents"] == json.loads(
        json.dumps(list(trace_events(STEPS)))
    )
    assert page.read_text(encoding="utf-8") == html_page(STEPS)


def test_without_an_output_file_nothing_is_done(report: Path) -> None:
    result = segattn("timeline", report)
    assert result.status == 2
    assert (
        result.err
        == "error: nothing to write: give --perfetto FILE, --html FILE, --json or several\n"
    )


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"steps": [{}]}', '{"steps": 3}'])
def test_a_file_that_is_no_report_is_one_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    result = segattn("timeline", path, "--html", tmp_path / "page.html")
    assert result.status == 2
    assert "other.json" in result.err
    assert len(result.err.splitlines()) == 1


def test_a_missing_report_is_one_error(tmp_path: Path) -> None:
    result = segattn("timeline", tmp_path / "absent", "--html", tmp_path / "page.html")
    assert result.status == 2
    assert "absent is missing" in result.err
