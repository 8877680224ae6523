"""The signatures of the interpreter against the documented ones, and the coverage page."""

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from segattn.tests.checks.coverage.api_pins import read_pins
from segattn.tests.checks.coverage.command import (
    DOC_PATH,
    Row,
    coverage,
    drift,
    load_api,
    render,
    stale_rows,
)


def test_every_signature_that_exists_is_the_documented_one() -> None:
    assert drift(load_api()) == []


def test_the_coverage_page_is_right_and_every_name_has_a_test() -> None:
    pins = read_pins(Path(__file__).parent)
    rows = coverage(load_api(), pins)
    assert stale_rows(DOC_PATH.read_text(), rows, pins) == []
    assert [row.name for row in rows if row.status == "missing" or not row.test] == []


def test_a_page_with_a_wrong_status_or_test_is_stale(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("def test_iota():\n    nisa.iota(1)\n")
    pins = read_pins(tmp_path)
    right = Row("nki.isa", "iota", "v2", "implemented", "test_a.py::test_iota")
    assert stale_rows(render([right]), [right], pins) == []
    for wrong, message in (
        (replace(right, status="missing"), "nki.isa.iota: missing, is implemented"),
        (
            replace(right, test="test_a.py::test_b"),
            "nki.isa.iota: test_a.py::test_b does not use it",
        ),
        (replace(right, name="other"), "nki.isa.iota: not in the page, is implemented"),
    ):
        assert message in stale_rows(render([wrong]), [right], pins)
    assert stale_rows(render([right]), [], pins) == ["nki.isa.iota: does not exist"]


def test_the_names_that_only_trn3_has_are_those_the_documentation_marks() -> None:
    only_trn3 = {f"{row.module}.{row.name}" for row in _rows() if row.since == "v4"}
    assert only_trn3 == {
        "nki.isa.nc_matmul_mx",
        "nki.isa.quantize_mx",
        "nki.isa.activate2",
        "nki.isa.exponential",
        "nki.isa.rand2",
        "nki.language.abs_max",
        "nki.language.abs_min",
        "nki.language.NkiTensor.indirect",
        "nki.language.float8_e5m2_x4",
        "nki.language.float8_e4m3fn_x4",
        "nki.language.float4_e2m1fn_x4",
    }


def test_a_changed_parameter_or_default_is_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    api: dict[str, Any] = {
        name: {"functions": {}, "classes": {}, "constants": {}} for name in load_api()
    }
    api["nki"]["functions"]["f"] = _function([("dst", None), ("mode", "None")])
    api["nki"]["functions"]["g"] = _function([("dst", None)])
    api["nki"]["functions"]["h"] = _function([("dst", None)])
    for name, function in {"f": _other_default, "g": _other_name, "h": _same}.items():
        monkeypatch.setattr(f"segattn.reference.nki.{name}", function, raising=False)
    assert drift(api) == [
        "nki.f: default mode=0, documented None",
        "nki.g: parameters ['to'], documented ['dst']",
    ]


def test_the_page_names_the_most_specific_test_of_each_name(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(
        inspect.cleandoc(
            """
            def kernel(x):
                nisa.memset(x, value=0)
                nisa.dma_copy(x.ap([[1, 1]]), x)

            def test_many_things():
                kernel(nl.ndarray((1, 1)))
                nisa.tensor_copy(1, 2)

            def test_memset_fills():
                kernel(0)
            """
        )
    )
    pins = read_pins(tmp_path)
    assert pins.find("nki.isa", "memset") == "test_one.py::test_memset_fills"
    assert pins.find("nki.isa", "tensor_copy") == "test_one.py::test_many_things"
    assert pins.find("nki.language", "NkiTensor.ap") == "test_one.py::test_memset_fills"
    assert pins.find("nki.isa", "iota") == ""
    page = render([Row("nki.isa", "iota", "v2", "missing", "")])
    assert "0 implemented, 0 trn3-only, 1 missing" in page
    assert "| `iota` | v2 | missing |  |" in page


def _rows() -> list[Row]:
    return coverage(load_api(), read_pins(Path(__file__).parent))


def _function(params: list[tuple[str, str | None]]) -> dict[str, Any]:
    return {
        "since": "v2",
        "params": [
            {"name": name, "kind": "positional_or_keyword", "default": default}
            for name, default in params
        ],
    }


def _same(dst: object) -> None: ...


def _other_name(to: object) -> None: ...


def _other_default(dst: object, mode: object = 0) -> None: ...
