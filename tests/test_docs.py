"""The documents: links, navigation, and every code block that can run here."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from segattn.cli import COMMANDS
from segattn.reference.nki.install import uninstall
from segattn.tests.command import segattn

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
ALL = [*PAGES, *sorted(ROOT.glob("*.md"))]
CODE = re.compile(r"```python(?: title=\"([\w.]+)\")?\n(.*?)```", re.DOTALL)
CONSOLE = re.compile(r"```console\n(.*?)```", re.DOTALL)
BEFORE = {
    "cost_model.md": """
import numpy as np
from segattn.reference import nki
nl, nisa = nki.language, nki.isa
q = k = v = np.ones((128, 128), np.float32)


@nki.jit
def kernel(q, k, v):
    out = nl.ndarray(q.shape, dtype=q.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=q)
    return out
""",
    "runner.md": """
from segattn.runner.engine import Engine
from segattn.scheduler import Request
from segattn.scheduler import SchedulerConfig
from segattn.tests.runner.random_model import random_model

model, config, prompt = random_model(), SchedulerConfig(2, 128, 256, 16, 40), [1, 2, 3]
""",
}
"""What the text of a page takes as given."""


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\((?!http)([^) ]+)\)", text):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_navigation_of_the_site_holds_every_page_once() -> None:
    named = re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(named) == [page.name for page in PAGES]
    index = (ROOT / "docs" / "index.md").read_text()
    assert {"index.md", *re.findall(r"\((\w+\.md)\)", index)} == set(named)


@pytest.fixture
def without_nki() -> Iterator[None]:
    """`nki` is gone again after the test, and so are the modules of the page."""
    before = set(sys.modules)
    yield
    uninstall()
    for name in set(sys.modules) - before:
        if not name.startswith("segattn"):
            del sys.modules[name]


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_the_code_of_a_page_runs_from_top_to_bottom(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_nki: None
) -> None:
    text = page.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")  # tables do not wrap what is looked for
    names: dict[str, Any] = {}
    exec(BEFORE.get(page.name, ""), names)
    for match in re.finditer(r"```(?:python|console).*?```", text, re.DOTALL):
        code, console = CODE.fullmatch(match.group()), CONSOLE.fullmatch(match.group())
        if code and code.group(1):
            Path(code.group(1)).write_text(code.group(2))
        elif code:
            exec(compile(code.group(2), page.name, "exec"), names)
        elif console:
            for command, *expected in _commands(console.group(1)):
                _run(command, expected)


def _commands(text: str) -> list[list[str]]:
    """Each command line with the lines that it must print, in this order."""
    return [part.splitlines() for part in re.split(r"^\$ ", text, flags=re.MULTILINE) if part]


def _run(command: str, expected: list[str]) -> None:
    program, *arguments = command.split()
    assert program == "segattn"
    result = segattn(*arguments)
    printed = _plain(result.out + result.err)
    assert "Traceback" not in printed
    for line in expected:
        assert _plain(line) in printed, f"{command}: no {line!r} in\n{printed}"


def _plain(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_every_command_in_a_code_block_parses(page: Path) -> None:
    for block in re.findall(r"```(?:sh|console)?\n(.*?)```", page.read_text(), re.DOTALL):
        for line in re.findall(r"(?:^|\$ |bin/)segattn (\w[^\n]*)", block, re.MULTILINE):
            assert line.split()[0] in {*COMMANDS, "completion"}, line
