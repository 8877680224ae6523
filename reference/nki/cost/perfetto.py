"""Export of a modelled timeline as a trace for ui.perfetto.dev: one track per engine and queue."""

from typing import Any

from ..records import Dma, Instruction, LoopMark, Matmul
from .plan import Step, Stream
from .result import CostResult
from .simulate import Timing

_TRACK_ORDER = ("tensor", "scalar", "vector", "gpsimd", "sync")


def _arguments(step: Step, timing: Timing) -> dict[str, Any]:
    record = step.record
    file, line = record.source
    values: dict[str, Any] = {
        "source": f"{file}:{line}",
        "modelled": True,
        "waited_ns": round(timing.start - timing.stream_free, 1),
        "waited_for": timing.cause,
    }
    if isinstance(record, LoopMark) or record.iteration:
        values["iteration"] = list(record.iteration)
    if isinstance(record, Matmul):
        values.update(K=record.K, M=record.M, N=record.N)
    if isinstance(record, Dma) and step.transfer is not None:
        transfer = step.transfer
        values.update(bytes=transfer.nbytes, descriptors=transfer.num_descriptors)
        values["issued_us"] = timing.start / 1e3
    elif isinstance(record, Instruction):
        values["elements"] = [list(a.shape) for a in (*record.writes, *record.reads)]
    return values


def _name(step: Step) -> str:
    record = step.record
    op = record.op if isinstance(record, Instruction) else ""
    return f"{record.opcode} {op}".rstrip()


def _track_names(result: CostResult) -> list[Stream]:
    """All tracks: compute engines first, then queues, per core."""
    streams = {step.stream for step in result.plan.steps}
    queues = {step.queue for step in result.plan.steps if step.queue is not None}

    def order(stream: Stream) -> tuple[int, int, str]:
        core, name = stream
        known = _TRACK_ORDER.index(name) if name in _TRACK_ORDER else len(_TRACK_ORDER)
        return core, known, name

    return sorted(streams | queues, key=order)


def perfetto_trace(result: CostResult) -> dict[str, Any]:
    """Chrome trace-event JSON: a process per core, a thread per engine and per DMA queue.

    Times are microseconds. A DMA is shown on its queue while the DMA engines work on it, and on
    the engine that issues it for as long as that holds the engine. Some engines of a queue begin
    with a DMA while others still work on the one before; as spans of one track may not overlap, it
    is shown from the end of that one (`transfer_start_us` is when it began).
    """
    tracks = {stream: number for number, stream in enumerate(_track_names(result), start=1)}
    events: list[dict[str, Any]] = []
    for core in sorted({core for core, _ in tracks}):
        name = f"{result.launch.kernel}, core {core} (modelled)"
        events.append({"ph": "M", "name": "process_name", "pid": core, "args": {"name": name}})
    for (core, name), number in tracks.items():
        metadata = {"ph": "M", "pid": core, "tid": number}
        events.append({**metadata, "name": "thread_name", "args": {"name": name}})
        events.append({**metadata, "name": "thread_sort_index", "args": {"sort_index": number}})

    def span(stream: Stream, name: str, start: float, end: float, args: dict[str, Any]) -> None:
        events.append(
            {
                "ph": "X",
                "name": name,
                "pid": stream[0],
                "tid": tracks[stream],
                "ts": start / 1e3,
                "dur": max(0.0, end - start) / 1e3,
                "args": args,
            }
        )

    shown_until: dict[Stream, float] = {}
    for step, timing in zip(result.plan.steps, result.timings, strict=True):
        args = _arguments(step, timing)
        if step.queue is None:
            span(step.stream, _name(step), timing.start, timing.free, args)
            continue
        end = timing.done - result.constants.dma_semaphore_ns
        before = shown_until.get(step.queue, 0.0)
        start = min(max(timing.transfer_start, before), end)
        shown_until[step.queue] = max(before, end)
        args["transfer_start_us"] = timing.transfer_start / 1e3
        span(step.queue, _name(step), start, end, args)
        if step.stream != step.queue:
            span(step.stream, f"issue {_name(step)}", timing.start, timing.free, args)
    total = {"modelled_us": result.modelled_us, "kernel": result.launch.kernel}
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": total}
