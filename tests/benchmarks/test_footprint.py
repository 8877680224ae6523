"""`segattn bench footprint`: programs without data, and that those of supported shapes fit."""

import json
from pathlib import Path
from random import Random
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segattn.benchmarks.kernels import footprint as command
from segattn.benchmarks.kernels.footprint import Footprint, footprint
from segattn.benchmarks.kernels.modelled import public_functions, record
from segattn.benchmarks.kernels.outline import outline, outline_call
from segattn.benchmarks.kernels.shapes import DRAW
from segattn.benchmarks.kernels.workloads import CacheWrite, Decode, Workload
from segattn.cli import main
from segattn.reference import nki
from segattn.reference.nki import isa as nisa
from segattn.reference.nki import language as nl
from segattn.reference.nki.core import Core
from segattn.reference.nki.errors import CapacityError
from segattn.reference.nki.memory import fullest_moment
from segattn.reference.nki.records import Instruction
from segattn.reference.nki.regions import SBUF

BF16 = ml_dtypes.bfloat16


@nki.jit
def _looping(x: nl.NkiTensor, count: nl.NkiTensor) -> nl.NkiTensor:
    """7 instructions. A later trip reads `constant` again, so 400 + 380 bytes are live at once."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    number = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=number, src=count)
    trips = nisa.register_alloc()
    nisa.register_load(trips, number)
    constant = nl.ndarray((128, 100), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=constant, value=0.0)

    def body(i: nisa.VirtualRegister) -> None:
        first = nl.ndarray((128, 10), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=first, src=constant[:, 0:10])
        nisa.dma_copy(dst=out[:, 0:10], src=first)
        second = nl.ndarray((128, 95), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=second, value=1.0)
        nisa.dma_copy(dst=out[:, 0:95], src=second)

    nl.fori_loop(0, trips, body)
    return out


@nki.jit
def _counting(x: nl.NkiTensor, count: nl.NkiTensor) -> nl.NkiTensor:
    """3 instructions in a loop whose bound and rows are scalars."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    trips = nisa.scalar_load(count)

    def body(i: nisa.NkiScalar) -> None:
        tile = nl.ndarray((1, 100), dtype=nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=x[2 * i + 1])
        nisa.dma_copy(dst=out[i], src=tile)

    nl.fori_loop(0, trips - 1, body)
    return out


@nki.jit
def _nine_banks(x: nl.NkiTensor) -> nl.NkiTensor:
    tiles = []
    for _ in range(9):
        tiles.append(nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.psum))
        nisa.memset(dst=tiles[-1], value=0.0)
    for tile in tiles:
        nisa.memset(dst=tile, value=1.0)
    return x


def test_an_outline_walks_loops_that_scalars_bound() -> None:
    found = outline(_counting, 1, np.zeros((128, 100), np.float32), np.zeros((1, 1), np.int32))
    assert (found.num_instructions, found.num_loops) == (3, 1)
    assert found.sbuf_bytes == 400


def test_an_outline_counts_loop_bodies_once_and_keeps_what_they_carry() -> None:
    found = outline(_looping, 1, np.zeros((128, 100), np.float32), np.zeros((1, 1), np.int32))
    assert found.num_instructions == 7
    assert found.sbuf_bytes == 400 + 380


def test_an_outline_reads_no_data() -> None:
    nothing = np.full((128, 100), np.nan, np.float32)
    outline(_looping, 1, nothing, np.full((1, 1), 10**6, np.int32))
    assert np.isnan(nothing).all()


def test_more_psum_than_there_is_ends_an_outline() -> None:
    with pytest.raises(CapacityError, match="9 needed"):
        outline(_nine_banks, 1, np.zeros((128, 1), np.float32))


@pytest.mark.parametrize(
    "work", [Decode(3, 30000, q_heads=6, kv_heads=2), Decode(2, 60000, 2, 1, 64), CacheWrite(300)]
)
@pytest.mark.parametrize("lnc", [1, 2])
def test_an_outline_is_what_a_run_on_data_uses(
    work: Workload, lnc: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode and cache writes have no branch that a run may leave out."""
    options = {"lnc": lnc} if isinstance(work, Decode) else {}
    functions, peaks = public_functions(), []
    original = Core.finish

    def finish(core: Core) -> None:
        peaks.append(fullest_moment([use for use in core.uses[SBUF] if use.first >= 0])[0])
        original(core)

    monkeypatch.setattr(Core, "finish", finish)
    (launch,) = record(work, functions, **options)
    monkeypatch.undo()
    counts = [0, 0]
    for entry in launch.records:
        counts[entry.core] += isinstance(entry, Instruction) and not any(entry.iteration)
    arguments = work.arguments(np.random.default_rng(0))
    found = outline_call(functions[work.kernel], **arguments, **options)
    assert found.num_instructions == max(counts)
    assert found.sbuf_bytes == max(peaks)


@pytest.mark.parametrize("kernel", ["paged_decode", "write_kv_cache"])
@given(random=st.randoms(use_true_random=False))
def test_every_supported_shape_fits_or_is_refused(kernel: str, random: Random) -> None:
    found = footprint(DRAW[kernel](random), public_functions()[kernel])
    assert found.fits, found


@pytest.mark.parametrize(
    ("dtype", "d", "heads", "num_queries", "num_requests", "width", "window", "lnc"),
    [
        (ml_dtypes.bfloat16, 64, (32, 8), 1, 64, 8, None, 2),
        (np.float32, 128, (16, 8), 8, 17, 1, 129, 1),
    ],
)
def test_many_small_groups_of_decode_fit(
    dtype: npt.DTypeLike,
    d: int,
    heads: tuple[int, int],
    num_queries: int,
    num_requests: int,
    width: int,
    window: int | None,
    lnc: int,
) -> None:
    """Shapes that were too large once."""
    cache = np.zeros((1, heads[1], 64, d), dtype)
    found = outline_call(
        public_functions()["paged_decode"],
        q=np.zeros((num_requests, heads[0], num_queries, d), dtype),
        k_cache=cache,
        v_cache=cache,
        block_tables=np.full((num_requests, width), -1, np.int32),
        context_lens=np.zeros(num_requests, np.int32),
        sliding_window=window,
        lnc=lnc,
    )
    assert found.sbuf_bytes <= 212_992


@pytest.mark.parametrize("kernel", ["padded_prefill", "segmented_attention"])
@settings(max_examples=4)  # a walk takes seconds
@given(random=st.randoms(use_true_random=False))
def test_every_supported_prefill_fits_or_is_refused(kernel: str, random: Random) -> None:
    found = footprint(DRAW[kernel](random), public_functions()[kernel])
    assert found.fits, found


def test_the_command_names_programs_that_are_too_large(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["bench", "footprint", "--kernel", "write_kv_cache", "--samples", "3"]
    results = tmp_path / "r.json"
    assert main([*arguments, "--out", str(results)]) == 0
    rows: list[dict[str, Any]] = json.loads(results.read_text())
    accepted = [row for row in rows if not row["refused"]]
    assert len(accepted) == 3
    printed = capsys.readouterr().out
    assert str(max(row["num_instructions"] for row in accepted)) in printed
    monkeypatch.setattr(command, "instruction_limit", lambda: 0)
    assert main(arguments) == 1
    assert printed.count("over: ") == 0
    assert capsys.readouterr().out.count("over: write_kv_cache T") == 3


@pytest.mark.parametrize(("softmax", "most"), [("bounded", 18_900), ("exact", 39_500)])
def test_the_program_of_a_chunk_of_2048_rows_of_8_heads(softmax: str, most: int) -> None:
    """What a core serves of a model of 64 query heads on 8 KV heads, over 32768 cached tokens."""
    rows, cache = np.zeros((1, 2048, 128), BF16), np.zeros((1, 1, 32, 128), BF16)
    found = outline_call(
        public_functions()["segmented_attention"],
        q=np.repeat(rows, 8, 0), k=rows, v=rows, k_cache=cache, v_cache=cache,
        block_table=np.full(1024, -1, np.int32), prior_tokens=0, num_tokens=0, softmax=softmax,
    )  # fmt: skip
    assert 0.95 * most <= found.num_instructions <= most


def test_long_programs_are_counted() -> None:
    found = [Footprint("k", str(n), 1, n) for n in (60_000, 60_001, 60_002)]
    table = command.footprint_table({"k": found}).splitlines()
    row = next(line for line in table if line.startswith("k "))
    assert row.split()[1:5] == ["3", "0", "0", "2"]


def test_psum_and_sbuf_count_as_well() -> None:
    assert Footprint("k", "l", 212_992, 5_000_000).fits
    assert not Footprint("k", "l", 212_993, 5_000_000).fits
    assert not Footprint("k", "l", 212_992, 5_000_001).fits
    assert not Footprint("k", "l", too_large="psum").fits


def test_fewer_than_one_sample_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "footprint", "--samples", "0"]) == 2
    assert "--samples=0: must be at least 1" in capsys.readouterr().err
