"""The lint's rules: what NKI refuses or removed, and that any Python of a tracer passes."""

import pytest

from segattn.reference.nki.lint.rules import NAMES
from segattn.tests.nki.lint_cases import Case, assert_case, read_cases, reports

INNER = """
@nki.jit
def inner(x):
    out = nl.ndarray((1, 4), nl.int32, buffer=nl.hbm)
    return out
"""
OUTER = """
@nki.jit
def outer(x):
    return inner(x)
"""
REACHED = """
def helper(n):
    return [nl.arange(i) for i in range(n)]

class Sizes:
    def rows(self):
        return helper(4)

@nki.jit
def kernel(x):
    sizes = Sizes()
"""
FACTORY = """
def factory(sizes):
    total = sum([s for s in sizes])
    @nki.jit
    def kernel(x):
        n = [nl.arange(i) for i in range(total)]
        return x
    return kernel
"""
PYTHON = """
from contextlib import contextmanager
from functools import partial

@dataclass(frozen=True)
class Base:
    rows: int = 1

class Tile(Base):
    def __init__(self, rows, *, columns=4):
        super().__init__(rows)
        self.columns = columns

    @property
    def size(self):
        return self.rows * self.columns

@contextmanager
def region():
    yield

def tiles(n):
    for i in range(n):
        yield Tile(i, columns=2 ** 40)

@nki.jit
def kernel(x, *shapes, scale=1.0, **named):
    import os
    total = 0
    def count(tile):
        nonlocal total
        total += tile.size
    sizes = {(t.rows, t.columns): t for t in tiles(4) if t is not None}
    try:
        [count(tile) for tile in sizes.values()]
        with region():
            load = partial(nl.load, dtype=nl.float32)
        if (n := len({*shapes})) > 4:
            raise ValueError(n)
        match n:
            case 0:
                a, *rest = sorted(map(lambda s: -s, range(4)))
            case _:
                del named["a"]
    except KeyError as error:
        assert error
    finally:
        t = load(x)
    return x
"""


@pytest.mark.parametrize("case", read_cases("kernels"), ids=str)
def test_outputs_and_the_namespace_of_the_old_language_are_checked(case: Case) -> None:
    assert_case(case)


@pytest.mark.parametrize("case", read_cases("registers"), ids=str)
def test_values_of_the_device_stay_out_of_python_control_flow(case: Case) -> None:
    assert_case(case)


@pytest.mark.parametrize("case", read_cases("values"), ids=str)
def test_values_of_the_wrong_kind_and_state_outside_are_reported(case: Case) -> None:
    assert_case(case)


@pytest.mark.parametrize("case", read_cases("names"), ids=str)
def test_nki_is_known_under_every_name_that_the_file_gives_it(case: Case) -> None:
    assert_case(case)


def test_every_rule_that_a_user_can_name_has_a_case() -> None:
    names = ("api", "kernels", "names", "registers", "values")
    assert {case.rule for name in names for case in read_cases(name)} | {"syntax"} == set(NAMES)


def test_any_python_is_allowed_in_a_kernel() -> None:
    assert reports(PYTHON) == []


def test_a_kernel_that_another_kernel_calls_may_return_any_buffer() -> None:
    assert [item.rule for item in reports(INNER)] == ["output-buffer"]
    assert reports(INNER + OUTER) == []


def test_helpers_and_methods_that_a_kernel_reaches_are_kernel_code() -> None:
    assert [item.rule for item in reports(REACHED)] == ["removed-api"]


def test_a_kernel_inside_a_factory_is_linted_and_the_factory_is_not() -> None:
    (found,) = reports(FACTORY)
    assert (found.rule, found.column) == ("removed-api", 14)


def test_names_that_another_module_re_exports_are_known_by_convention() -> None:
    source = "from .backend import nl as lang, nki\n\n@nki.jit\ndef kernel(x):\n    lang.arange(4)"
    assert [item.rule for item in reports(source)] == ["removed-api"]


def test_a_file_that_is_not_python_is_one_finding() -> None:
    (found,) = reports("def kernel(x:\n    pass")
    assert (found.rule, found.kind.fails) == ("syntax", True)
