"""Read the JSON of `segattn generate` again, strictly."""

from dataclasses import dataclass
from pathlib import Path

from ..reference.json_files import FormatError, check, read_object, required, typed
from .report import FORMAT
from .step import Step


@dataclass(frozen=True)
class Report:
    """The parts of a report that other commands use."""

    steps: list[Step]
    prefill_buckets: list[int]
    decode_buckets: list[int]


def read_report(path: Path) -> Report:
    """The report in a file. FormatError when it is none, or one with values of other types."""
    found = read_object(path)
    if found.get("format") != FORMAT:
        raise FormatError(f"{path}: not the output of `segattn generate --json` ({FORMAT!r})")
    rows = required(found, "steps", str(path))
    if not isinstance(rows, list):
        raise FormatError(f"{path}: steps must be a list")
    config = required(found, "config", str(path))
    if not isinstance(config, dict):
        raise FormatError(f"{path}: config must be an object")
    lists = {}
    for name in ("prefill_buckets", "decode_buckets"):
        place = f"{path}: config.{name}"
        lists[name] = check(list[int], required(config, name, f"{path}: config"), place)
        if not lists[name] or min(lists[name]) < 1 or sorted(set(lists[name])) != lists[name]:
            raise FormatError(f"{place}={lists[name]}: must ascend from at least 1")
    steps = [typed(Step, row, f"{path}: steps[{number}]") for number, row in enumerate(rows)]
    return Report(steps, **lists)
