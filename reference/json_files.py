"""Strict reading of JSON that others wrote: limits on size and depth, types and ranges by field."""

import dataclasses
import json
import math
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

MAX_BYTES = 1 << 28
MAX_DEPTH = 64

_T = TypeVar("_T")


class FormatError(ValueError):
    """A file is not what it must be; the message names file, place, value and what is allowed."""


def shown(value: object) -> str:
    """A value as errors show it: never longer than a line."""
    text = repr(value) if not isinstance(value, (list, dict)) else json.dumps(value, default=repr)
    return text if len(text) <= 60 else f"{text[:57]}..."


def read_text(path: Path, max_bytes: int = MAX_BYTES) -> str:
    """The text of a UTF-8 file. FormatError when it cannot be read or is too large."""
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise FormatError(f"{path}: must be at most {max_bytes} bytes long")
        return data.decode("utf-8")
    except FileNotFoundError as error:
        raise FormatError(f"{path} is missing") from error
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: byte {error.start} is not UTF-8 text") from error


def read_object(path: Path, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """The JSON object in a file. FormatError naming the file for anything else."""
    return parse_object(read_text(path, max_bytes), str(path))


def parse_object(text: str, place: str) -> dict[str, Any]:
    """The JSON object that `text` is: no key twice, no NaN, at most MAX_DEPTH levels deep."""

    def constant(name: str) -> NoReturn:
        raise FormatError(f"{place}: {name} is not a JSON number")

    def pairs(found: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in found:
            if key in result:
                raise FormatError(f"{place}: key {shown(key)} is there twice")
            result[key] = value
        return result

    try:
        value = json.loads(text, parse_constant=constant, object_pairs_hook=pairs)
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise FormatError(f"{place} is not valid JSON: {reason}") from error
    if not isinstance(value, dict):
        raise FormatError(f"{place}: is {shown(value)}, must be a JSON object")
    _check_depth(value, place)
    return value


def _check_depth(value: object, place: str) -> None:
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            if isinstance(parent, (list, dict))
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
        if not level:
            return
    raise FormatError(f"{place}: must be at most {MAX_DEPTH} levels deep")


def typed(cls: type[_T], values: object, place: str) -> _T:
    """A dataclass made from a JSON object whose keys are its fields.

    Every value must have its field's type; numbers must be finite and, as all sizes, counts and
    times of ours, not below 0. FormatError for that, for a missing key and for an unknown one.
    """
    if not isinstance(values, dict):
        raise FormatError(f"{place}: is {shown(values)}, must be a JSON object")
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            raise FormatError(f"{place}: unknown key {shown(key)}, must be one of {[*fields]}")
    hints = typing.get_type_hints(cls)
    made = {}
    for name, field in fields.items():
        if name in values:
            made[name] = check(hints[name], values[name], f"{place}: {name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise FormatError(f"{place}: key {name!r} is missing")
    return cls(**made)


def check(hint: Any, value: object, place: str) -> Any:
    """`value` as the annotated type, or FormatError naming the place."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (hint,) = (each for each in arguments if each is not type(None))
        return check(hint, value, place)
    if origin is typing.Literal:
        if value in arguments:
            return value
        raise FormatError(
            f"{place}={shown(value)}: must be one of {', '.join(map(str, arguments))}"
        )
    if origin in (tuple, list):
        if not isinstance(value, list):
            raise FormatError(f"{place}={shown(value)}: must be a list")
        return origin(check(arguments[0], v, f"{place}[{n}]") for n, v in enumerate(value))
    if hint is float and type(value) in (int, float):
        if not (math.isfinite(value) and value >= 0):  # type: ignore[arg-type, operator]
            raise FormatError(f"{place}={shown(value)}: must be a finite number of at least 0")
        return float(value)  # type: ignore[arg-type]
    if type(value) is not hint:
        names = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}
        raise FormatError(f"{place}={shown(value)}: must be {names.get(hint, hint)}")
    if hint is int and not 0 <= value < 1 << 63:  # type: ignore[operator]
        raise FormatError(f"{place}={shown(value)}: must be within 0..2**63 - 1")
    return value


def required(values: Mapping[str, Any], key: str, place: str) -> Any:
    """The value of a key that must be there."""
    if key not in values:
        raise FormatError(f"{place}: key {key!r} is missing")
    return values[key]
