"""Instruction tests write kernels as lambdas and comprehensions, which the compiler refuses."""

from collections.abc import Iterator

import pytest

from segattn.reference import nki


@pytest.fixture(autouse=True)
def any_python() -> Iterator[None]:
    """Do not lint the kernels of these tests; a test of the lint turns the rule on itself."""
    with nki.strict(purity="off"):
        yield
