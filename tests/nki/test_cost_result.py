"""What a cost result says about a launch, against hand arithmetic."""

import json
from dataclasses import fields
from pathlib import Path

import pytest

from segattn.reference.nki.cost.constants import (
    BANDS,
    BASE,
    SENSITIVITY,
    CostConstants,
    variant,
)
from segattn.reference.nki.cost.needs import needs
from segattn.reference.nki.cost.perfetto import perfetto_trace
from segattn.reference.nki.cost.result import CostResult
from segattn.tests.checks.calibration.streams import Stream, bank, hbm, part, tile

MATMUL = 512 / 2.4
EXP = (512 + 64) / 1.2


def small() -> Stream:
    """A load, a matmul that needs it, and an exp of the result, twice."""
    stream = Stream()
    for _ in range(2):
        moving, scores, p = tile(128, 512), bank(128, 512), tile(128, 512)
        stream.load(moving, hbm(128, 512), "sync")
        stream.matmul(0, scores, tile(128, 128), moving)
        stream.compute("scalar", "activation", 0, (p,), (scores,), "exp")
    return stream


def test_busy_time_and_utilisation_add_up_per_engine() -> None:
    result = small().evaluate()
    engine_ns = 2 * 8 * (9 + 1024 / 24.5)
    expected = {
        "tensor": 2 * 2 * MATMUL,  # at half speed: it was idle before
        "scalar": 2 * EXP + 1280,
        "vector": 0,
        "gpsimd": 0,
        "dma": engine_ns,
        "hbm": 2 * 128 * 1024 / 358,
    }
    assert result.busy_ns == pytest.approx({(0, name): ns for name, ns in expected.items()})
    assert result.bounding_engine == (0, "scalar")
    share = result.busy_ns[0, "scalar"] / result.modelled_ns
    assert result.utilisation[0, "scalar"] == pytest.approx(share)


def test_utilisation_and_roofline_count_the_flops_of_the_problem() -> None:
    result = small().evaluate()
    flops = 2 * 2 * 128 * 128 * 512
    peak = 128 * 128 * 2 * 2.4
    assert result.mfu(flops) == pytest.approx(flops / peak / result.modelled_ns)
    assert result.mfu(flops, 1000.0) == pytest.approx(flops / peak / 1000)
    few_bytes, many_bytes = 1.0, 358e3
    assert result.roofline_share(flops, few_bytes) == pytest.approx(result.mfu(flops))
    assert result.roofline_share(flops, many_bytes) == pytest.approx(1000 / result.modelled_ns)


def test_dma_totals_count_payload_descriptors_and_efficiency() -> None:
    dma = small().evaluate().dma
    assert (dma.nbytes, dma.hbm_bytes, dma.num_instructions) == (2 * 131072, 2 * 131072, 2)
    assert dma.num_descriptors == 2 * 128
    assert dma.efficiency == pytest.approx(1024 / 23 / (9 + 1024 / 24.5))


def test_a_copy_within_hbm_moves_its_bytes_twice() -> None:
    stream = Stream()
    stream.load(hbm(16, 256), hbm(16, 256))
    dma = stream.evaluate().dma
    assert (dma.nbytes, dma.hbm_bytes) == (8192, 16384)


def test_the_critical_path_is_a_chain_that_covers_the_modelled_time() -> None:
    result = small().evaluate()
    path = result.critical_path
    assert sum(step.ns for step in path) == pytest.approx(result.modelled_ns)
    names = [step.step.record.opcode for step in path]
    assert names == ["dma_copy", "nc_matmul", "activation", "activation"]
    assert [step.cause for step in path] == ["start", "RAW", "RAW", "order"]


def test_the_longest_stall_names_both_statements() -> None:
    result = small().evaluate()
    stall = next(s for s in result.stalls() if s.engine == "tensor")
    load, matmul = (result.plan.steps[i].record for i in (0, 1))
    assert (stall.engine, stall.cause, stall.count) == ("tensor", "RAW", 2)
    assert (stall.opcode, stall.source) == ("nc_matmul", matmul.source)
    assert (stall.waits_for_opcode, stall.waits_for) == ("dma_copy", load.source)
    gaps = result.timings[1].start + result.timings[4].start - result.timings[1].free
    assert stall.ns == pytest.approx(gaps)


def looped() -> CostResult:
    stream = Stream()
    x = tile(128, 8)
    stream.compute("vector", "memset", 0, (x,), ())
    stream.loop("begin", 0)
    for _ in range(3):
        stream.loop("iteration", 0)
        stream.compute("vector", "tensor_copy", 0, (tile(128, 8),), (x,))
    stream.loop("end", 0)
    return stream.evaluate()


def test_loop_bodies_count_once_in_the_program_and_each_trip_when_executed() -> None:
    result = looped()
    assert result.num_executed == {"vector": 4}
    assert (needs(result).num_instructions, needs(result).num_loops) == (2, 1)


def test_the_critical_path_goes_on_through_the_edges_of_a_loop() -> None:
    result = looped()
    opcodes = [step.step.record.opcode for step in result.critical_path]
    assert opcodes[0] == "memset"
    assert opcodes.count("tensor_copy") == 3
    assert sum(step.ns for step in result.critical_path) == pytest.approx(result.modelled_ns)


def test_perfetto_has_a_track_per_engine_and_queue_and_a_span_per_step() -> None:
    trace = json.loads(json.dumps(perfetto_trace(small().evaluate())))
    events = trace["traceEvents"]
    tracks = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    assert list(tracks) == ["tensor", "scalar", "sync", "sync.hwdge"]
    spans = [e for e in events if e["ph"] == "X"]
    by_track = {name: [e for e in spans if e["tid"] == tid] for name, tid in tracks.items()}
    assert {name: len(found) for name, found in by_track.items()} == {
        "tensor": 2,
        "scalar": 2,
        "sync": 2,
        "sync.hwdge": 2,
    }
    matmul = by_track["tensor"][0]
    assert matmul["dur"] == pytest.approx(2 * MATMUL / 1e3)
    assert (matmul["args"]["K"], matmul["args"]["N"]) == (128, 512)
    assert matmul["args"]["source"].startswith(__file__)
    load = by_track["sync.hwdge"][0]
    assert load["ts"] == pytest.approx(0.74)
    assert load["args"]["bytes"] == 131072
    for found in by_track.values():
        ends = [e["ts"] + e["dur"] for e in found]
        begins = [e["ts"] for e in found]
        assert all(b >= e - 1e-9 for b, e in zip(begins[1:], ends[:-1], strict=True))


def test_perfetto_shows_dmas_of_one_queue_that_run_at_the_same_time_one_after_the_other() -> None:
    stream = Stream()
    for rows, columns in ((8, 4096), (128, 512)):  # the first keeps one of the 16 engines busy
        stream.load(tile(rows, columns), hbm(rows, columns), "sync")
    result = stream.evaluate()
    first, second = result.timings
    end = (first.done - BASE.dma_semaphore_ns) / 1e3
    assert second.transfer_start / 1e3 < end
    spans = [e for e in perfetto_trace(result)["traceEvents"] if e["ph"] == "X"]
    shown, later = [e for e in spans if e["name"] == "dma_copy"]
    assert later["ts"] == pytest.approx(shown["ts"] + shown["dur"])
    assert later["ts"] == pytest.approx(end)
    assert later["args"]["transfer_start_us"] == second.transfer_start / 1e3


def test_measured_constants_replace_single_fields(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"constants": {"scalar_overhead_cycles": 200}, "device": "trn2"}))
    constants = CostConstants.from_results(path)
    assert constants.scalar_overhead_cycles == 200
    assert constants.vector_ghz == BASE.vector_ghz


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"scalar_overhead": 1}, "'scalar_overhead' is unknown; allowed"),
        ({"whole_tensors": 1}, "'whole_tensors' is 1; allowed: true, false"),
        ({"hbm_rate": -1}, "'hbm_rate' is -1; allowed: a finite number >= 0"),
        ({"hbm_rate": "fast"}, "'hbm_rate' is 'fast'"),
        ({"hbm_rate": float("nan")}, "'hbm_rate' is nan"),
    ],
)
def test_constants_that_make_no_sense_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", "\\(")):
        BASE.with_measured(values)


@pytest.mark.parametrize(("name", "changes"), [*BANDS.items(), *SENSITIVITY.items()])
def test_each_variant_changes_what_it_says_and_no_more(
    name: str, changes: dict[str, float]
) -> None:
    changed = {
        f.name: getattr(variant(name), f.name)
        for f in fields(CostConstants)
        if getattr(variant(name), f.name) != getattr(BASE, f.name)
    }
    assert changed == changes


def test_an_unknown_variant_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ValueError, match="variant is 'fast'; allowed: best, base, field, whole"):
        variant("fast")


def test_what_a_device_measured_stays_in_every_band() -> None:
    measured = BASE.with_measured({"loop_iteration_ns": 7000})
    assert {variant(name, measured).loop_iteration_ns for name in BANDS} == {7000}
    assert variant("field", measured).tensor_ghz == 2.1


def test_a_stall_on_a_shared_bank_is_called_so() -> None:
    stream = Stream()
    both = bank(128, 512)
    half = part(both, slice(0, 256)), part(both, slice(256, 512))
    stream.compute("vector", "tensor_copy", 0, (tile(128, 256, "float32"),), (half[0],))
    stream.compute("scalar", "activation", 0, (tile(128, 256),), (half[1],), "copy")
    (stall,) = stream.evaluate().stalls()
    assert (stall.engine, stall.cause, stall.waits_for_opcode) == ("scalar", "bank", "tensor_copy")
