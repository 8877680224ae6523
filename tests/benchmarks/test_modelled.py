"""`segattn bench kernels` in its modelled form: numbers, table, files and pictures."""

import json
from pathlib import Path

import numpy as np
import pytest

from segattn.benchmarks.kernels import command as kernels
from segattn.benchmarks.kernels import documented
from segattn.benchmarks.kernels.modelled import COLUMNS, model, public_functions, record
from segattn.benchmarks.kernels.targets import TARGETS, Target
from segattn.benchmarks.kernels.workloads import CacheWrite, Decode, KeyColumns, Prefill
from segattn.cli import main
from segattn.reference.nki.cost.constants import BASE
from segattn.reference.nki.trace import Dma

SMALL = (
    Target(Prefill(128, 256, q_heads=2), 0.0),
    Target(Decode(2, 128), 0.0, "hbm"),
    Target(CacheWrite(128, kv_heads=2), 0.9, "hbm"),
)


def test_a_modelled_row_has_every_column_and_counts_the_problem() -> None:
    work = Prefill(128, 256, q_heads=2)
    launches = record(work, public_functions())
    modelled, results = model(work, launches)
    assert set(modelled.us) == set(COLUMNS)
    assert modelled.us["base"] == pytest.approx(sum(r.modelled_us for r in results))
    assert modelled.us["best"] < modelled.us["base"] < modelled.us["field"]
    expected = work.model_flops / BASE.peak_flops_per_ns / (1e3 * modelled.us["base"])
    assert modelled.mfu() == pytest.approx(expected)


def test_a_cache_write_moves_the_bytes_of_the_problem_and_little_more() -> None:
    work = CacheWrite(256, kv_heads=2)
    launches = record(work, public_functions())
    moved = sum(
        sum(a.nbytes for a in (*r.writes[:1], *r.reads[:1]) if a.buffer == "hbm")
        for launch in launches
        for r in launch.records
        if isinstance(r, Dma)
    )
    assert work.model_bytes <= moved <= 1.1 * work.model_bytes


def test_the_command_prints_the_table_and_writes_results_timelines_and_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "TARGETS", SMALL)
    monkeypatch.setattr(kernels, "SWEEP", (Prefill(128, 0, q_heads=2),))
    results, timelines, plots = tmp_path / "r.json", tmp_path / "timelines", tmp_path / "plots"
    arguments = ["--out", str(results), "--perfetto", str(timelines), "--stalls", "2", "--sweep"]
    assert main(["bench", "kernels", *arguments]) == 1  # the cache write misses its target
    printed = capsys.readouterr().out
    assert all(column in printed for column in COLUMNS), "cells are whole on 80 columns"
    assert "…" not in printed
    assert "All numbers are modelled, none measured" in printed
    assert "a launch costs 130 to 210 us more" in printed
    assert "Longest stalls (modelled)" in printed
    written = json.loads(results.read_text())
    assert [row["label"] for row in written["rows"]] == [t.workload.label for t in SMALL]
    assert [row["label"] for row in written["sweep"]] == ["128/0, 2x128"]
    timeline = sorted(timelines.iterdir())[0]
    command = ["bench", "plots", str(results), "--timeline", str(timeline), "--folder", str(plots)]
    assert main(command) == 0
    pictures = {p.name: p.stat().st_size for p in plots.iterdir()}
    assert set(pictures) == {"roofline.png", "prior.png", "timeline.png"}
    assert min(pictures.values()) > 5000


def test_padding_is_compared_with_a_bucket_that_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "TARGETS", SMALL[1:2])
    pair = Prefill(256, 0, q_heads=1, num_tokens=100), Prefill(128, 0, q_heads=1, num_tokens=100)
    monkeypatch.setattr(kernels, "PADDED", pair)
    ratio = kernels.padding_ratio(BASE)
    assert ratio > 0.99  # more rows are never faster
    assert main(["bench", "kernels", "--padding"]) == (0 if ratio <= 1.15 else 1)
    assert f"{ratio:.2f} (limit 1.15)" in capsys.readouterr().out


def test_the_exact_softmax_is_compared_with_the_bounded_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = Target(Prefill(512, 4096, q_heads=4), 0.0)
    monkeypatch.setattr(kernels, "TARGETS", (row,))
    # Most of its keys are in a rest of a prior, and in a window's sections.
    others = Prefill(1024, 1500), Prefill(1024, 8192, q_heads=1, window=8000)
    monkeypatch.setattr(kernels, "EXACT_ROWS", others)
    assert main(["bench", "kernels", "--exact"]) == 1  # above the limit of 1.6
    printed = capsys.readouterr().out.split("exact over auto ")[1:]
    ratios = [float(each.split()[0]) for each in printed]
    assert len(ratios) == 3
    # 512/4096, 1024/1500, and a window whose keys before the chunk are gathered one by one.
    for ratio, most in zip(ratios, (1.77, 1.63, 1.76), strict=True):
        assert most - 0.05 <= ratio <= most


def test_the_other_shapes_of_the_page_are_modelled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "TARGETS", (Target(CacheWrite(128, kv_heads=1), 0.0),))
    shapes = Prefill(128, 640, q_heads=1, window=300), KeyColumns(Decode(1, 512, block_size=128))
    monkeypatch.setattr(documented, "DOCUMENTED", shapes)
    monkeypatch.setattr(kernels, "EXACT_ROWS", ())
    monkeypatch.setattr(kernels, "PADDED", (shapes[0], shapes[0]))
    assert main(["bench", "kernels", "--documented"]) == 0
    *_, head, _, windowed, columns, padding = capsys.readouterr().out.splitlines()
    assert head == "| call | best us | base us | field us | share at base | exact over auto |"
    label, *times, share, ratio = (cell.strip() for cell in windowed.strip("| ").split("|"))
    assert (label, share.endswith("of peak")) == ("128/640, 1x128, window 300", True)
    best, base, field = map(float, times)
    assert best < base < field
    assert float(ratio) > 0
    assert columns.startswith("| decode 1x512, 8x128, blocks of 128, key columns | ")
    assert columns.endswith(" of HBM |  |")
    assert padding.startswith("128/640, 1x128, window 300 over 128/640")


def test_a_wide_table_is_as_wide_as_it_says() -> None:
    work = Decode(1, 100, table_tokens=4096)
    assert work.label == "decode 1x100, 8x128, tables of 4096"
    assert work.arguments(np.random.default_rng(0))["block_tables"].shape == (1, 128)


def test_a_filter_that_selects_nothing_names_the_rows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "kernels", "--only", "4096/77"]) == 2
    assert TARGETS[0].workload.label in capsys.readouterr().err
