"""`install()`: the module names that third-party kernels import."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from segattn.reference import nki as interpreter
from segattn.reference.nki.errors import NkiWarning
from segattn.reference.nki.install import install, uninstall
from segattn.reference.nki.typing import TensorShape, tensor

IMPORTS = """
import nki
import nki.isa as nisa
import nki.language as nl
import nki.dtype as dt
import nki.typing as nt
import nki.compiler
import neuronxcc.nki.typing as old_typing
import neuronxcc.nki.language as old_language
from nki.isa.constants import dge_mode, oob_mode
from nki.isa import constants
from nki.language import NKIObject
"""


@pytest.fixture
def installed() -> Iterator[None]:
    install()
    yield
    uninstall()


def test_nothing_is_registered_before_install() -> None:
    code = "import sys, segattn.reference.nki; print([m for m in sys.modules if m == 'nki'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_every_module_that_kernels_import_is_the_interpreter(installed: None) -> None:
    names: dict[str, object] = {}
    exec(IMPORTS, names)
    assert names["nki"] is interpreter
    assert names["nl"] is interpreter.language
    assert names["oob_mode"] is interpreter.isa.oob_mode
    assert names["nt"] is names["old_typing"]
    dtypes = names["dt"]
    assert getattr(dtypes, "bfloat16", None) == interpreter.language.bfloat16


def test_the_old_language_says_once_that_it_is_another_and_where_to_look() -> None:
    install()
    try:
        names: dict[str, object] = {}
        exec("import neuronxcc.nki as n, neuronxcc.nki.language as o", names)
        with pytest.warns(NkiWarning, match=r"before NKI 0\.2.*docs/old_language\.md") as caught:
            exec("a, b = n.jit, o.add", names)
        assert len(caught) == 1
        assert (names["a"], names["b"]) == (interpreter.jit, interpreter.language.add)
        with pytest.raises(AttributeError, match=r"nl.arange: removed.*docs/old_language\.md"):
            exec("o.arange(4)", names)
        exec("from neuronxcc.nki.language import *", names)
        assert names["multiply"] is interpreter.language.multiply
    finally:
        uninstall()


def test_the_page_on_the_old_language_names_what_exists() -> None:
    page = (Path(__file__).parents[2] / "docs" / "old_language.md").read_text()
    rows = re.findall(r"^\| (.+) \| (.+) \|$", page, re.MULTILINE)[2:]
    assert len(rows) > 20
    roots = {"nl": interpreter.language, "nisa": interpreter.isa, "nki": interpreter}
    used = [match for _, new in rows for match in re.findall(r"\b(nl|nisa|nki)\.(\w+)", new)]
    assert len(used) > 20
    assert [name for root, name in used if not hasattr(roots[root], name)] == []
    gone = [match for old, _ in rows for match in re.findall(r"\bnl\.(\w+)", old)]
    assert {"arange", "par_dim", "mgrid", "loop_reduce", "spmd_dim"} <= set(gone)


def test_install_twice_is_install_once_and_uninstall_removes_all() -> None:
    install()
    install()
    assert "neuronxcc.nki.isa" in sys.modules
    uninstall()
    assert [name for name in sys.modules if name.split(".")[0] in ("nki", "neuronxcc")] == []


def test_install_refuses_to_replace_an_nki_that_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "nki", ModuleType("nki"))
    with pytest.raises(RuntimeError, match="another nki is imported already"):
        install()


def test_there_is_no_compiler(installed: None) -> None:
    with pytest.raises(AttributeError, match="the interpreter has no compiler"):
        exec("import nki.compiler\nnki.compiler.kernel_builder")


def test_a_tensor_annotation_carries_its_shape() -> None:
    assert tensor[128, 512] == TensorShape((128, 512))
    assert tensor[4] == TensorShape((4,))
    with pytest.raises(TypeError, match="sizes are integers, not '4'"):
        tensor["4"]  # type: ignore[index]  # what the error is about
