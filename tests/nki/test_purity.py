"""Rule purity: what a launch leaves behind outside of its kernel."""

import re
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from segattn.reference import nki
from segattn.reference.nki.errors import NkiValidationError, NkiWarning

nl, nisa = nki.language, nki.isa
X = np.zeros((2, 4), np.float32)
LOG: list[Any] = []
NESTED: dict[str, list[Any]] = {"all": []}
SEEN: set[int] = set()
count = 0
other = ModuleType("other")
other.calls = []  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with nki.strict(purity="error"):
        yield
    LOG.clear()
    NESTED["all"].clear()
    SEEN.clear()
    other.calls.clear()


def logs(x: Any) -> None:
    LOG.append(x.shape)


def logs_nested(x: Any) -> None:
    NESTED["all"].append(1)


def remembers(x: Any) -> None:
    SEEN.add(x.shape[0])


def counts(x: Any) -> None:
    global count
    count += 1


def logs_in_a_module(x: Any) -> None:
    other.calls.append(1)


class Totals:
    launches = 0

    def __init__(self) -> None:
        self.rows = 0
        self.log: list[int] = []

    @cached_property
    def width(self) -> int:
        return 4


TOTALS = Totals()


def counts_in_a_class(x: Any) -> None:
    Totals.launches += 1


def counts_in_an_object(x: Any) -> None:
    TOTALS.rows += x.shape[0]


def logs_in_an_object(x: Any) -> None:
    TOTALS.log.append(x.shape[0])


def keeps_in_a_default(x: Any, log: Any = []) -> None:  # noqa: B006 - what the test is about
    log.append(1)


def keeps_a_property(x: Any) -> None:
    assert TOTALS.width == x.shape[1]


class Recorder:
    def run(self, x: Any) -> None:
        logs(x)


def reads(x: Any) -> None:
    assert len(LOG) + len(NESTED) + len(SEEN) + count < 100


def logs_if_wide(x: Any) -> None:
    if x.shape[1] > 4:
        LOG.append(x)


def local_list(x: Any) -> None:
    log: list[Any] = []
    log.append(x)


def kernel_with(body: Callable[[Any], None]) -> Any:
    @nki.jit
    def kernel(x: Any) -> Any:
        body(x)
        return x

    return kernel


RECORDER = Recorder()


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (logs, "LOG, a list outside"),
        (partial(logs), "LOG, a list outside"),
        (RECORDER.run, "LOG, a list outside"),
        (logs_nested, "NESTED, a list outside"),
        (remembers, "SEEN, a set outside"),
        (counts, "the global count"),
        (logs_in_a_module, "calls, a list outside"),
        (counts_in_a_class, "an attribute of Totals"),
        (counts_in_an_object, "an attribute of TOTALS"),
        (logs_in_an_object, "TOTALS, a list outside"),
        (keeps_in_a_default, "a default of keeps_in_a_default, a list"),
    ],
)
def test_a_change_of_what_lies_outside_is_an_error_wherever_it_happens(
    body: Any, what: str
) -> None:
    here = rf"kernel kernel changes {what}.*\(at {re.escape(__file__)}:\d+\) \[rule purity\]"
    with pytest.raises(NkiValidationError, match=here):
        kernel_with(body)(X)


@pytest.mark.parametrize("body", [reads, logs_if_wide, local_list, keeps_a_property])
def test_reading_and_branches_that_are_not_taken_are_fine(body: Any) -> None:
    kernel = kernel_with(body)
    kernel(X)
    LOG.append(1)  # the host may
    kernel(X)


def test_a_list_around_the_kernel_is_outside_and_a_function_argument_belongs_to_it() -> None:
    found: list[Any] = []

    @nki.jit
    def appends(x: Any) -> Any:
        found.append(x)
        return x

    @nki.jit
    def calls(x: Any, f: Any) -> Any:
        f(x)
        return x

    with pytest.raises(NkiValidationError, match="changes found, a list"):
        appends(X)
    with pytest.raises(NkiValidationError, match="changes LOG, a list"):
        calls(X, logs)
    calls(X, reads)


def test_the_second_launch_is_judged_as_the_first() -> None:
    kernel = kernel_with(logs)
    for _ in range(2):
        with nki.strict(purity="warn"), pytest.warns(NkiWarning, match="changes LOG"):
            kernel(X)
    with nki.strict(purity="off"):
        kernel(X)
    assert len(LOG) == 3


def test_code_without_a_source_file_is_judged_too() -> None:
    scope: dict[str, Any] = {"LOG": [], "nki": nki}
    exec("@nki.jit\ndef made(x):\n    LOG.append(1)\n    return x", scope)
    with pytest.raises(NkiValidationError, match=r"changes LOG.*<string>"):
        scope["made"](X)
