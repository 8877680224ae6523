"""The command that replays traces: what it prints, and its exit status."""

import copy
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from segattn.cli import main
from segattn.scheduler.testing.replay import replay
from segattn.scheduler.testing.trace import TraceDriver, make_scheduler
from segattn.scheduler.testing.trace_file import read_traces, write_traces
from segattn.tests.scheduler.test_golden_traces import TRACES

TRACE: dict[str, Any] = {
    "id": "t1",
    "kind": "base",
    "config": {"max_num_seqs": 2, "block_size": 4},
    "events": [
        ["add", {"id": "a", "prompt": [5, 6, 7], "max_tokens": 4}],
        ["drafts", []],
        ["schedule", 0],
        ["update", 0, [["a", [9]]]],
        ["drafts", [["a", [9, 9]]]],
        ["schedule", 1],
        ["update", 1, [["a", [9, 8]]]],
        ["pause", 1],
        ["add", {"id": "b", "prompt": [], "max_tokens": 4}],
        ["reset", 1],
        ["schedule", 2],
        ["abort", ["a", "b"]],
        ["update", 2, []],
    ],
}


def recorded() -> dict[str, Any]:
    """The trace with what the scheduler shows after each event."""
    driver = TraceDriver(make_scheduler(TRACE["kind"], TRACE["config"]))
    return TRACE | {"events": [driver.apply(event) for event in TRACE["events"]]}


def test_a_recorded_trace_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = recorded()
    # By hand: the three tokens of the prompt, then one known token and two drafts.
    assert trace["events"][2][2]["nst"] == [["a", 3]]
    assert trace["events"][5][2]["nst"] == [["a", 3]]
    assert trace["events"][5][2]["spec"] == [["a", [9, 9]]]
    assert trace["events"][8][2] == "RequestError"
    assert trace["events"][9][2:] == [True, {"waiting": ["a"], "running": [], "free": 63}]
    assert trace["events"][10][2]["nst"] == []
    assert trace["events"][11][2] == ["a"]
    path = tmp_path / "ok.jsonl.gz"
    write_traces(path, iter([trace, trace]))
    assert list(read_traces(path)) == [trace, trace]
    assert main(["replay", str(path)]) == 0
    assert capsys.readouterr().out == "2 passed, 0 failed\n"


def test_the_releases_of_the_traces_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = recorded()
    path = tmp_path / "ok.jsonl.gz"
    traces = [trace | {"vllm": release} for release in ("0.33.0", "0.24.0", "0.33.0")]
    write_traces(path, [*traces, trace])
    assert main(["replay", str(path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "4 passed, 0 failed",
        "1 recorded on vLLM 0.24.0",
        "2 recorded on vLLM 0.33.0",
    ]
    assert main(["replay", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["releases"] == {"0.33.0": 2, "0.24.0": 1}


def test_the_first_difference_of_a_failing_trace_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = recorded(), copy.deepcopy(recorded())
    bad["events"][5][2]["total"] = 4
    bad["events"][6][3]["free"] = 0
    path = tmp_path / "bad.jsonl.gz"
    write_traces(path, iter([bad, good]))
    assert main(["replay", str(path)]) == 1
    assert capsys.readouterr().out == (
        "bad.jsonl.gz t1: event 5 schedule 1, field total: expected 4, got 3\n1 passed, 1 failed\n"
    )


@pytest.mark.parametrize(
    ("change", "field", "got"),
    [
        ({"kind": "other"}, "exception", "ValueError: kind='other'"),
        ({"config": {"block_size": 0}}, "exception", "ValueError: block_size=0"),
        ({"events": [["dance", 1]]}, "exception", "ValueError: event='dance'"),
        ({"events": [["abort", ["x"], ["x"]]]}, "element 2", "[]"),
        ({"events": [["pause", 1, "more"]]}, "elements", "['pause', 1]"),
    ],
)
def test_a_trace_that_cannot_be_replayed_fails(
    change: dict[str, Any], field: str, got: str
) -> None:
    difference = replay(TRACE | change)
    assert difference is not None
    assert difference.field == field
    assert got in str(difference)


def test_a_field_that_only_one_side_has_is_a_difference() -> None:
    trace = recorded()
    del trace["events"][2][2]["alltok"]
    difference = replay(trace)
    assert difference is not None
    assert (difference.index, difference.field, difference.expected) == (2, "alltok", None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"plain text", "Not a gzipped file"),
        (gzip.compress(b'{"id": "a"'), "delimiter"),
        (gzip.compress(b""), "it holds no trace"),
        (gzip.compress(b"[1, 2]"), "line 1: is [1, 2], must be a JSON object"),
        (gzip.compress(json.dumps(TRACE).encode() + b"\n")[:-9], "end-of-stream"),
    ],
    # Named, since compressed bytes hold the time and workers must collect the same tests.
    ids=["missing", "not gzip", "not JSON", "empty", "no trace", "cut off"],
)
def test_a_file_that_cannot_be_read_fails_and_the_others_are_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, message: str
) -> None:
    good, bad = tmp_path / "good.jsonl.gz", tmp_path / "bad.jsonl.gz"
    write_traces(good, iter([recorded()]))
    if content is not None:
        bad.write_bytes(content)
    assert main(["replay", str(bad), str(good)]) == 1
    out = capsys.readouterr().out
    assert "bad.jsonl.gz is not a readable .jsonl.gz of traces: " in out
    assert message in out
    assert out.splitlines()[-1].startswith("1 passed, ")


OBSERVED = {"schedule": 2, "update": 3, "abort": 2, "reset": 2}
"""Where in an event of each name the observations begin."""


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to the values that are neither lists nor dicts."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from leaves(item, (*path, place))
    else:
        yield path


def changed(value: Any, path: tuple[Any, ...]) -> Any:
    """A copy of `value` with another leaf at `path`."""
    if not path:
        return value + "x" if isinstance(value, str) else not value
    copied = value.copy()
    copied[path[0]] = changed(value[path[0]], path[1:])
    return copied


@pytest.mark.parametrize("kind", ["base", "async", "neuron", "neuron_async"])
def test_every_recorded_value_is_compared(kind: str) -> None:
    trace = next(read_traces(TRACES / f"{kind}.jsonl.gz"))
    events = trace["events"][:30]
    paths = [
        (number, *path)
        for number, event in enumerate(events)
        if event[0] in OBSERVED
        for path in leaves(event)
        if path[0] >= OBSERVED[event[0]]
    ]
    assert len(paths) > 300
    for path in paths:
        found = replay(trace | {"events": changed(events, path)})
        assert found is not None
        assert found.index == path[0]
