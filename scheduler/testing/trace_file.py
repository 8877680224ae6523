"""Files of traces: a JSON object per line of a .jsonl.gz, read strictly."""

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...reference.json_files import MAX_BYTES, FormatError, check, parse_object, shown, typed
from ...reference.outputs import OutputFile

Event = list[Any]


@dataclass(frozen=True)
class _Head:
    """What a trace has beside its events; other keys tell where it was recorded."""

    id: str
    kind: str
    scheduler: str | None = None
    judge: Literal["model", "invariants"] | None = None


@dataclass(frozen=True)
class _Request:
    """An "add" event's request; the ranges of its numbers are the scheduler's to refuse."""

    id: str
    prompt: list[int]
    max_tokens: int
    arrival: float = 0.0
    priority: int = 0
    eos: int | None = None
    stop: list[int] | None = None
    min_tokens: int = 0
    salt: str | None = None
    skip_read: bool = False


def read_traces(path: Path) -> Iterator[dict[str, Any]]:
    """The traces of a .jsonl.gz file. FormatError for a line that is no trace."""
    with gzip.open(path, "rb") as lines:
        number = size = 0
        while line := lines.readline(MAX_BYTES):
            number, size = number + 1, size + len(line)
            if size >= MAX_BYTES:
                raise FormatError(f"line {number}: must end within {MAX_BYTES} bytes")
            trace = parse_object(line.decode("utf-8"), f"line {number}")
            check_trace(trace, f"line {number}")
            yield trace


def pack_traces(traces: Iterable[Mapping[str, Any]]) -> bytes:
    """The bytes of a file that `read_traces` reads; equal traces give equal bytes."""
    lines = [json.dumps(trace, separators=(",", ":")).encode() + b"\n" for trace in traces]
    return gzip.compress(b"".join(lines), mtime=0)


def write_traces(path: Path, traces: Iterable[Mapping[str, Any]]) -> None:
    """Write a .jsonl.gz file that `read_traces` reads."""
    OutputFile(path).save(pack_traces(traces))


def check_trace(trace: Mapping[str, Any], place: str) -> None:
    """FormatError naming the place of the first input that cannot drive a scheduler.

    What was observed is compared, so its form does not matter.
    """
    known = _Head.__dataclass_fields__
    head = typed(_Head, {name: trace[name] for name in known if name in trace}, place)
    for name in ("config", "policy"):
        part = trace.get(name)
        if not isinstance(part, dict) and not (part is None and name == "policy"):
            raise FormatError(f"{place}: {name}={shown(part)}: must be a JSON object")
    events = trace.get("events")
    if not isinstance(events, list):
        raise FormatError(f"{place}: events={shown(events)}: must be a list")
    for number, event in enumerate(events):
        _check_event(event, f"{place}: trace {shown(head.id)}, event {number}")


def _check_event(event: object, place: str) -> None:
    if not isinstance(event, list) or not event or not isinstance(event[0], str):
        raise FormatError(f"{place} is {shown(event)}, must be a list that starts with its name")
    name, *given = event
    hints = _INPUTS.get(name)
    if hints is None:
        raise FormatError(f"{place}: name={shown(name)}: must be one of {', '.join(_INPUTS)}")
    if len(given) < len(hints):
        raise FormatError(f"{place}: {name} has {len(given)} values, must have {len(hints)}")
    for hint, value in zip(hints, given, strict=False):
        if hint is _Request:
            _check_request(value, place)
        elif hint == "tokens":
            _check_tokens(value, place)
        elif hint == "flag":
            if type(value) not in (int, bool) or value not in (0, 1, 2):
                raise FormatError(f"{place}: {name}={shown(value)}: must be 0, 1 or 2")
        else:
            check(hint, value, f"{place}: {name}")
    if name == "schedule" and len(given) > 1 and not isinstance(given[1], dict):
        raise FormatError(f"{place}: schedule={shown(given[1])}: must be a JSON object")


_INPUTS: dict[str, tuple[Any, ...]] = {
    "add": (_Request,),
    "abort": (list[str],),
    "reset": ("flag",),
    "pause": ("flag",),
    "drafts": ("tokens",),
    "schedule": (int,),
    "fail": (int,),
    "update": (int, "tokens"),
}


def _check_request(value: object, place: str) -> None:
    if isinstance(value, dict):
        # Numbers below 0 are for the scheduler to refuse.
        value = {k: abs(v) if type(v) in (int, float) else v for k, v in value.items()}
    typed(_Request, value, f"{place}: request")


def _check_tokens(value: object, place: str) -> None:
    """[[request id, tokens], ...]; -1 is the placeholder of a draft."""
    if not isinstance(value, list):
        raise FormatError(f"{place}={shown(value)}: must be a list")
    for pair in value:
        is_pair = isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str)
        if not is_pair or not isinstance(pair[1], list):
            raise FormatError(f"{place}: {shown(pair)}: must be [request id, tokens]")
        if any(type(token) is not int for token in pair[1]):
            raise FormatError(f"{place}: {shown(pair[1])}: tokens must be integers")
