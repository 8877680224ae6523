"""Replay recorded traces and compare every decision.

Prints the first difference of each failing trace and closes with `N passed, N failed` and the
releases that they were recorded on; the exit status is 0 only if none failed. A trace that cannot
be replayed at all counts as failed.
"""

import json
import zlib
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...reference.terminal import one_line
from .subject import Subject
from .trace import Event, TraceDriver, make_scheduler, policy_of
from .trace_file import read_traces
from .trial import failure_of

_OPTIONAL = frozenset({"k", "skip_drafts", "stale"})
"""Fields that only some recordings have."""
_IGNORED = frozenset({"common"})
"""Blocks that all requests share: vLLM 0.33 counts them no more."""


@dataclass(frozen=True)
class Difference:
    """Where a replay leaves its trace: the event's number and name, the field, both values."""

    index: int
    event: str
    field: str
    expected: object
    got: object

    def __str__(self) -> str:
        return (
            f"event {self.index} {self.event}, field {self.field}: "
            f"expected {self.expected!r}, got {self.got!r}"
        )


def replay(trace: Mapping[str, Any]) -> Difference | None:
    """Drive a scheduler of ours with the inputs of `trace`; the first difference, None if equal.

    An exception that no event foresees is a difference too.
    """
    index, event = -1, ["start"]
    try:
        driver = TraceDriver(make_scheduler(trace["kind"], trace["config"], policy_of(trace)))
        optional = _OPTIONAL - _fields(trace["events"])
        for index, event in enumerate(trace["events"]):
            found = _compare(index, event, driver.apply(event), _IGNORED | optional)
            if found is not None:
                return found
    except Exception as error:  # any failure of the scheduler under test is the result
        got = f"{type(error).__name__}: {error}"
        return Difference(index, " ".join(map(str, event[:2])), "exception", None, got)
    return None


def compare_events(expected: Sequence[Event], got: Sequence[Event]) -> Difference | None:
    """The first difference between two recordings of the same inputs."""
    for index, (old, new) in enumerate(zip(expected, got, strict=False)):
        found = _compare(index, old, new, _IGNORED)
        if found is not None:
            return found
    if len(expected) != len(got):
        return Difference(min(len(expected), len(got)), "end", "events", len(expected), len(got))
    return None


def replay_finding(trace: Mapping[str, Any]) -> str | None:
    """Run a failure of `segattn fuzz` on the class that failed; how it fails, None if not.

    ValueError when the class is not there.
    """
    subject = Subject.load(trace["scheduler"], trace["kind"])
    policy, rules = trace.get("policy") or {}, trace["judge"]
    found = failure_of(subject, trace["config"], policy, trace["events"], rules)
    return None if found is None else f"{subject.name}: {found.message}"


def _fields(events: Sequence[Event]) -> set[str]:
    return {field for event in events for part in event if isinstance(part, dict) for field in part}


def _compare(index: int, expected: Event, got: Event, ignored: frozenset[str]) -> Difference | None:
    name = " ".join(str(part) for part in expected[:2] if isinstance(part, str | int))
    for place, (old, new) in enumerate(zip(expected, got, strict=False)):
        if isinstance(old, dict) and isinstance(new, dict):
            for field in [*old, *(key for key in new if key not in old)]:
                if field not in ignored and old.get(field) != new.get(field):
                    return Difference(index, name, field, old.get(field), new.get(field))
        elif old != new:
            return Difference(index, name, f"element {place}", old, new)
    if len(expected) != len(got):
        return Difference(index, name, "elements", expected, got)
    return None


def _problems(path: Path) -> Iterator[tuple[str, str, object]]:
    """Name, release and first difference (or None) of each trace.

    A broken file ends with its error.
    """
    empty = True
    try:
        for trace in read_traces(path):
            empty = False
            problem = replay_finding(trace) if "judge" in trace else replay(trace)
            yield trace["id"], str(trace.get("vllm", "")), problem
        if empty:
            raise ValueError("it holds no trace")
    except (OSError, EOFError, zlib.error, ValueError) as error:
        yield "is not a readable .jsonl.gz of traces", "", error


def add_arguments(parser: ArgumentParser) -> None:
    """Files of traces."""
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="a .jsonl.gz of traces, or of a failure that fuzz wrote",
    )


def run(options: Namespace) -> int:
    """Replay all files; 1 if a trace failed."""
    passed, failures, releases = 0, [], Counter[str]()
    for path in options.files:
        for name, release, problem in _problems(path):
            releases.update([release] if release else [])
            if problem is None:
                passed += 1
                continue
            failures.append({"file": str(path), "trace": name, "problem": str(problem)})
            if not options.json:
                print(one_line(f"{path.name} {name}: {problem}"))
    if options.json:
        print(json.dumps({"passed": passed, "failures": failures, "releases": releases}))
    else:
        print(f"{passed} passed, {len(failures)} failed")
        for release, count in sorted(releases.items()):
            print(f"{count} recorded on vLLM {release}")
    return int(bool(failures))
