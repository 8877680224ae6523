"""What releases fixed in the official simulator: the table of the docs, and tests of its rows.

Rows without a test elsewhere have theirs here.
"""

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from segattn.reference import nki
from segattn.reference.nki.errors import NkiValidationError
from segattn.tests.nki.running import floats, run

nl: Any = nki.language
nisa: Any = nki.isa
HERE: Final = Path(__file__).parent

ROW: Final = re.compile(r"^\| (\d\.\d\.\d) \| (.+) \| `(.+)::(\w+)` \|$", re.MULTILINE)
PAGE: Final = HERE.parents[1] / "docs" / "simulator_fixes.md"
FIXES: Final = ROW.findall(PAGE.read_text())


@cache
def _tests_of(file: str) -> frozenset[str]:
    tree = ast.parse((HERE / file).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_every_row_of_the_page_is_read() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| 0.")]
    assert len(lines) == len(FIXES) > 40


@pytest.mark.parametrize(("release", "what", "file", "name"), FIXES)
def test_every_fix_has_its_test(release: str, what: str, file: str, name: str) -> None:
    assert name in _tests_of(file), f"{release}, {what}: no {file}::{name}"


def test_more_than_128_partitions_are_named() -> None:
    """0.6.0: a clear error."""
    with pytest.raises(NkiValidationError, match="129 partitions; limit 128"):
        run(lambda dst, a: nl.ndarray((129, 4), dtype=nl.float32), floats(4, 8))


def test_local_gather_writes_a_sub_view_or_a_pattern() -> None:
    x, index = floats(16, 12), np.arange(16, dtype=np.uint16).reshape(16, 1) % 12

    def body(dst: Any, a: Any, i: Any) -> None:
        nisa.memset(dst, 0.0)
        nisa.local_gather(dst[:, 4:20], a, i)
        nisa.local_gather(dst.ap([[64, 16], [2, 16]], offset=32), a, i)

    got = run(body, x, index, out=((16, 64), "float32"))
    expected = np.zeros((16, 64), np.float32)
    expected[:, 4:20] = expected[:, 32:64:2] = x[:, index[:, 0]]
    np.testing.assert_array_equal(got, expected)


def test_a_matmul_reads_the_windows_of_a_convolution() -> None:
    """Windows of 3 over rows of 8, for 4 rows: [K, 4, 6] from [K, 4, 8]."""
    weights, rows = floats(16, 3, 5), floats(16, 4, 8, seed=1)

    def body(dst: Any, w: Any, x: Any) -> None:
        for tap in range(3):
            nisa.nc_matmul(dst, w[:, tap], x[:, :, tap : tap + 6])

    got = run(body, weights, rows, out=((5, 4, 6), "float32"), psum=True)
    expected = sum(
        np.einsum("km,krc->mrc", weights[:, tap], rows[:, :, tap : tap + 6]) for tap in range(3)
    )
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@dataclass(frozen=True)
class _Frozen(nki.language.NKIObject):
    size: int
    name: str = "tile"


def test_a_frozen_object_is_constructed() -> None:
    made = _Frozen(size=3)
    assert (made.size, made.name) == (3, "tile")
    with pytest.raises(AttributeError):
        made.size = 4  # type: ignore[misc]  # frozen


def test_a_reshape_keeps_the_number_of_elements() -> None:
    def body(dst: Any, a: Any) -> None:
        nisa.tensor_copy(dst, a.reshape((4, 7)))

    with pytest.raises(NkiValidationError, match=r"reshape.*\(4, 7\)"):
        run(body, floats(4, 8))


def test_power_takes_two_tiles() -> None:
    x = np.abs(floats(4, 8)) + 1
    squares = run(lambda dst, a: nisa.tensor_copy(dst, nl.power(a, nl.full((4, 8), 2, a.dtype))), x)
    np.testing.assert_allclose(squares, x * x, rtol=1e-6)
    with pytest.raises(NkiValidationError, match=r"exponent 2\.0 is a scalar"):
        run(lambda dst, a: nisa.tensor_copy(dst, nl.power(a, y=2.0)), x)


def test_rsqrt_takes_no_psum() -> None:
    def body(dst: Any, a: Any) -> None:
        tile = nl.ndarray((4, 8), dtype=nl.float32, buffer=nl.psum, name="sums")
        nisa.tensor_copy(tile, a)
        nisa.tensor_copy(dst, nl.rsqrt(tile))

    with pytest.raises(NkiValidationError, match=r"'sums' is in psum.*nisa\.activation"):
        run(body, np.ones((4, 8), np.float32))
