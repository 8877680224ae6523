"""The side-by-side with AWS's public kernel, tested with a stand-in of the same call."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from segattn.benchmarks.kernels.attention_cte import (
    Comparison,
    comparison_rows,
    comparison_table,
    dense_ms,
    dense_sample_ms,
    load_kernel,
    prefill_times,
)
from segattn.benchmarks.kernels.workloads import Prefill
from segattn.cli import main
from segattn.reference import nki
from segattn.reference.nki import isa as nisa
from segattn.reference.nki import language as nl

calls: list[dict[str, Any]] = []


@pytest.fixture(autouse=True)
def the_stand_in_may_record() -> Iterator[None]:
    """It adds to a list outside of the kernel, which the compiler refuses."""
    with nki.strict(purity="off"):
        yield


@nki.jit
def stand_in(
    q: nl.NkiTensor,
    k: nl.NkiTensor,
    v: nl.NkiTensor,
    causal_mask: bool,
    tp_q: bool,
    tp_k: bool,
    k_prior: nl.NkiTensor | None = None,
    v_prior: nl.NkiTensor | None = None,
    prior_used_len: nl.NkiTensor | None = None,
) -> nl.NkiTensor:
    """Transposes one tile of q on chip and stores it."""
    prior = None if k_prior is None else k_prior.shape
    calls.append({"q": q.shape, "k": k.shape, "prior": prior, "causal": causal_mask})
    out = nl.ndarray((128, 128), dtype=q.dtype, buffer=nl.shared_hbm)
    rows = nl.ndarray((128, 128), dtype=q.dtype, buffer=nl.sbuf)
    columns = nl.ndarray((128, 128), dtype=q.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=rows, src=q.ap([[128, 128], [1, 128]]))
    nisa.dma_transpose(dst=columns, src=rows)
    nisa.dma_copy(dst=out, src=columns)
    return out


def test_the_peer_gets_the_shape_of_the_workload_and_is_modelled_in_every_band() -> None:
    calls.clear()
    times = prefill_times(stand_in, Prefill(128, 256, q_heads=2))
    assert calls == [
        {"q": (2, 128, 128), "k": (1, 128, 128), "prior": (1, 256, 128), "causal": True}
    ]
    assert list(times.us) == ["best", "base", "field"]
    # 32 KiB at 36 and at 50 % of 368 B/ns,.
    gained = 32768 / 368 * (1 / 0.36 - 1 / 0.5) / 1e3
    assert times.us["base"] - times.us["best"] == pytest.approx(gained)
    assert times.us["field"] == times.us["base"]


def test_the_published_shape_runs_dense_on_two_cores() -> None:
    calls.clear()
    ms = dense_ms(stand_in, 1, 128, 256)
    assert ms > 0
    assert calls == 2 * [{"q": (1, 128, 128), "k": (1, 256, 128), "prior": None, "causal": False}]


def test_the_published_shape_is_linear_in_heads_and_sections() -> None:
    calls.clear()
    (whole,) = prefill_times(stand_in, Prefill(128, 0, q_heads=1), ("base",)).us.values()
    calls.clear()
    # The stand-in takes the same time whatever it is given: no slope, half of the heads.
    ms = dense_sample_ms(stand_in, 6, 128, 1024, section=256, columns=("base",))
    assert [call["k"] for call in calls] == [(1, 512, 128), (1, 768, 128)]
    assert ms["base"] == pytest.approx(3 * whole / 1e3)


@pytest.mark.parametrize(
    ("heads", "best", "base", "holds"),
    [(4, 181, 221, True), (4, 181, 219, False), (4, 179, 221, False), (1, 100, 100, True)],
)
def test_rows_of_four_heads_must_gain(heads: int, best: float, base: float, holds: bool) -> None:
    ours = {"best": 100.0, "base": 100.0, "field": 150.0}
    row = Comparison(Prefill(512, 512, heads), ours, {"best": best, "base": base, "field": 300.0})
    assert row.holds() == holds
    assert max(map(len, comparison_table([row]).splitlines())) <= 80
    *cells, mark = (comparison_table([row], wide=True) + " -").splitlines()[-1].split()
    assert mark == "-"
    assert cells[2:11] == [
        *("100.0", f"{best:.1f}", f"{best / 100:.2f}x"),
        *("100.0", f"{base:.1f}", f"{base / 100:.2f}x"),
        *("150.0", "300.0", "2.00x"),
    ]


def test_rows_are_the_prefill_targets_that_the_peer_supports() -> None:
    labels = {work.label for work in comparison_rows("")}
    assert "2048/8192, 4x128" in labels
    assert "2048/8193, 4x128" not in labels
    assert {work.label for work in comparison_rows("512/8192, 1")} == {"512/8192, 1x128"}


def test_a_folder_that_is_no_checkout_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="--nki-library is"):
        load_kernel(tmp_path)
    assert main(["bench", "attention_cte", "--nki-library", str(tmp_path)]) == 2
    assert "attention_cte.py" in capsys.readouterr().err
