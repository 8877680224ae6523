"""Level 1 of the lint: what the NKI compiler rejects, removed or deprecated."""

import pytest

from segattn.tests.nki.lint_cases import Case, assert_case, read_cases, reports

LOOP = """
@nki.jit
def kernel(x, n):
    def body(i):
        nisa.memset(x, value=0)
    nl.fori_loop(0, n, body)
"""
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
HOST = """
def host(paths):
    return [open(path) for path in paths if path is not False]

@nki.jit
def kernel(x):
    return x
"""
REACHED = """
def helper(n):
    return [i for i in range(n)]

class Sizes(NKIObject):
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
        n = [i for i in range(total)]
        return x
    return kernel
"""


@pytest.mark.parametrize("case", read_cases("python"), ids=str)
def test_python_outside_the_subset_is_reported_at_its_line(case: Case) -> None:
    assert_case(case, level=1)


@pytest.mark.parametrize("case", read_cases("kernels"), ids=str)
def test_kernel_signatures_outputs_and_classes_are_checked(case: Case) -> None:
    assert_case(case, level=1)


@pytest.mark.parametrize("case", read_cases("registers"), ids=str)
def test_registers_stay_out_of_python_control_flow(case: Case) -> None:
    assert_case(case, level=1)


@pytest.mark.parametrize("case", read_cases("values"), ids=str)
def test_values_of_the_wrong_kind_and_state_outside_are_reported(case: Case) -> None:
    assert_case(case, level=1)


@pytest.mark.parametrize("case", read_cases("names"), ids=str)
def test_nki_is_known_under_every_name_that_the_file_gives_it(case: Case) -> None:
    assert_case(case, level=1)


def test_a_tensor_of_the_body_of_a_dynamic_loop_ends_with_the_loop() -> None:
    loop = "@nki.jit\ndef kernel(x, n):\n    for i in nl.dynamic_range(n):\n"
    allocation = "t = nl.ndarray((1, 4), nl.float32)\n"
    use = "    nisa.memset(t, value=0)\n"
    inside = reports(loop + 8 * " " + allocation + use, level=1)
    assert [item.rule for item in inside] == ["deprecated-api", "loop-tensor"]
    before = (
        loop.replace("    for", f"    {allocation}    for") + 8 * " " + use.strip() + "\n" + use
    )
    assert [item.rule for item in reports(before, level=1)] == ["deprecated-api"]


def test_is_none_is_information_because_kernels_that_compile_use_it() -> None:
    source = "@nki.jit\ndef kernel(x, n):\n    if n is None:\n        n = 1"
    assert [item.rule for item in reports(source, level=0)] == ["is"]
    assert reports(source, level=1) == reports(source, level=2) == []


def test_the_loops_of_the_device_and_their_bodies_are_information() -> None:
    assert [item.rule for item in reports(LOOP, level=0)] == ["loop-body", "dynamic-loop"]
    assert reports(LOOP, level=1) == reports(LOOP, level=2) == []


def test_a_kernel_that_another_kernel_calls_may_return_any_buffer() -> None:
    assert [item.rule for item in reports(INNER, level=1)] == ["output-buffer"]
    assert reports(INNER + OUTER, level=1) == []


def test_host_code_of_the_same_file_is_not_kernel_code() -> None:
    assert reports(HOST, level=1) == reports(HOST, level=2) == []


def test_helpers_and_methods_that_a_kernel_reaches_are_kernel_code() -> None:
    assert [item.rule for item in reports(REACHED, level=1)] == ["comprehension"]


def test_a_kernel_inside_a_factory_is_linted_and_the_factory_is_not() -> None:
    (found,) = reports(FACTORY, level=1)
    assert (found.rule, found.column) == ("comprehension", 13)


def test_host_code_around_a_function_that_calls_nki_is_not_kernel_code() -> None:
    lines = [
        "def build(sizes):",
        "    total = [2 * s for s in sizes]",
        "    def kernel(x):",
        "        return nl.load(x), [i for i in range(4)]",
        "    return kernel, total",
    ]
    (found,) = reports("\n".join(lines), level=1)
    assert (found.rule, found.column) == ("comprehension", 28)


def test_names_that_another_module_re_exports_are_known_by_convention() -> None:
    source = "from .backend import nl as lang, nki\n\n@nki.jit\ndef kernel(x):\n    lang.arange(4)"
    assert [item.rule for item in reports(source, level=1)] == ["removed-api"]


def test_a_file_that_is_not_python_is_one_finding() -> None:
    (found,) = reports("def kernel(x:\n    pass", level=1)
    assert (found.rule, found.kind.fails) == ("syntax", True)
