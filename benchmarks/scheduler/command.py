"""Our scheduler and that of the installed vLLM, in one process.

Both get the same requests and the same sampled tokens; their decisions are compared step by step.
Printed are microseconds per request-step: time to make and add the requests (block hashing
included), to schedule and to update, divided by scheduled requests; or the time to abort requests,
divided by their number. The model's part is not timed.
Repetitions alternate between the two. Each does the same in every repetition, so the fastest time
of each addition and step is taken: other load on the machine only ever adds to it.
"""

import gc
import importlib
import json
import os
import textwrap
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from segattn.benchmarks.scheduler.workloads import Workload, workloads
from segattn.reference.extras import MissingExtraError
from segattn.scheduler import ModelRunnerOutput, RequestStatus, Scheduler
from segattn.scheduler.config import SchedulerConfig
from segattn.scheduler.testing.trace import make_request, make_scheduler

Decision = tuple[Any, ...]


@dataclass
class Run:
    """Outcome of one repetition."""

    seconds: list[float]
    """Of each addition, then of each step."""
    num_request_steps: int
    decisions: list[Decision]


def _fastest(runs: list[Run]) -> float:
    """Microseconds per request-step from the fastest time of each step."""
    seconds: float = sum(min(column) for column in zip(*(one.seconds for one in runs), strict=True))
    return 1e6 * seconds / runs[0].num_request_steps


def _token(position: int) -> int:
    return 7 + (position & 63)


class Ours:
    """Our scheduler as the benchmark drives it."""

    def __init__(self, kind: str, config: SchedulerConfig) -> None:
        self.scheduler = make_scheduler(kind, _fields(config), {})

    def add(self, given: dict[str, Any]) -> None:
        """Make a request from its fields in a trace and add it; timed, block hashing included."""
        self.scheduler.add_request(make_request(given))

    def abort(self, ids: list[str]) -> None:
        """End requests; timed."""
        self.scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED)

    def make_output(self, ids: list[str], tokens: list[list[int]]) -> Any:
        """A model output with the tokens of each request id; not timed."""
        return ModelRunnerOutput(ids, tokens)


class Real:
    """vLLM's scheduler as the benchmark drives it."""

    def __init__(self, kind: str, config: SchedulerConfig) -> None:
        from segattn.benchmarks.scheduler.vllm_reference import make_real_scheduler
        from segattn.scheduler.policy import NeuronPolicy

        self.config = config
        self.scheduler: Scheduler = make_real_scheduler(kind, config, NeuronPolicy())

    def add(self, given: dict[str, Any]) -> None:
        """Make vLLM's request from the same fields and add it; timed, block hashing included."""
        from segattn.benchmarks.scheduler.vllm_reference import make_real_request

        self.scheduler.add_request(make_real_request(given, self.config))

    def abort(self, ids: list[str]) -> None:
        """End requests; timed."""
        from vllm.v1.request import RequestStatus as RealStatus

        self.scheduler.finish_requests(ids, RealStatus.FINISHED_ABORTED)

    def make_output(self, ids: list[str], tokens: list[list[int]]) -> Any:
        """The same as vLLM's model output, without logprobs; not timed."""
        from vllm.v1.outputs import ModelRunnerOutput as RealOutput

        return RealOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=tokens,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )


def _fields(config: SchedulerConfig) -> dict[str, Any]:
    names = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "num_blocks")
    return {name: getattr(config, name) for name in (*names, "policy")}


def drive(side: Ours | Real, workload: Workload) -> Run:
    """Drive one scheduler through the workload."""
    if workload.warm is not None:
        side.add({"id": "warm", "prompt": workload.warm, "max_tokens": 1, "eos": None})
        while side.scheduler.requests:
            _step(side)
    gc.collect()
    gc.disable()
    try:
        seconds: list[float] = []
        for number, prompt in enumerate(workload.prompts):
            given = {
                "id": f"r{number}",
                "prompt": prompt,
                "max_tokens": workload.max_tokens,
                "eos": None,
            }
            begin = perf_counter()
            side.add(given)
            if not workload.num_untimed_steps:
                seconds.append(perf_counter() - begin)
        prompts = list(side.scheduler.requests.values())
        for number in range(workload.num_waiting):
            side.add(_short(f"w{number}"))
        decisions: list[Decision] = []
        num_request_steps = 0
        num_untimed, last = workload.num_untimed_steps, len(seconds) + workload.max_steps
        while side.scheduler.requests and len(seconds) < last:
            is_timed = num_untimed == 0
            if is_timed and workload.num_aborts:
                ids = [request.request_id for request in side.scheduler.running]
                begin = perf_counter()
                side.abort(ids[: workload.num_aborts])
                seconds.append(perf_counter() - begin)
                num_request_steps += workload.num_aborts
                # vLLM frees the blocks of several in the order of a set: no step is alike then.
                if len(seconds) < last:
                    decisions.append(_step(side)[1])
                continue
            begin = perf_counter()
            for arrival in range(workload.num_arrivals * is_timed):
                side.add(_short(f"a{len(decisions)}-{arrival}"))
            arrival_seconds = perf_counter() - begin
            step_seconds, decision = _step(side)
            decisions.append(decision)
            if is_timed:
                seconds.append(arrival_seconds + step_seconds)
                num_request_steps += len(decision[0])
            elif all(request.num_output_tokens for request in prompts):
                num_untimed -= 1
    finally:
        gc.enable()
    return Run(seconds, num_request_steps, decisions)


def _short(name: str) -> dict[str, Any]:
    return {"id": name, "prompt": [*range(10, 26)], "max_tokens": 3, "eos": None}


def _step(side: Ours | Real) -> tuple[float, Decision]:
    scheduler = side.scheduler
    begin = perf_counter()
    output = scheduler.schedule()
    seconds = perf_counter() - begin
    requests = scheduler.requests
    ids = list(output.num_scheduled_tokens)
    tokens = [
        [] if requests[i].is_prefill_chunk else [_token(requests[i].num_computed_tokens)]
        for i in ids
    ]
    cached = output.scheduled_cached_reqs
    decision = (
        list(output.num_scheduled_tokens.items()),
        [
            (n.req_id, n.num_computed_tokens, list(n.block_ids[0]))
            for n in output.scheduled_new_reqs
        ],
        list(cached.num_computed_tokens),
        [None if blocks is None else list(blocks[0]) for blocks in cached.new_block_ids],
    )
    model_output = side.make_output(ids, tokens)
    begin = perf_counter()
    scheduler.update_from_output(output, model_output)
    return seconds + perf_counter() - begin, decision


def compare(kind: str, workload: Workload, repetitions: int) -> dict[str, Any]:
    """One line of the table. RuntimeError when the two decide differently."""
    ours, real = [], []
    for _ in range(min(repetitions, workload.most_repetitions)):
        ours.append(drive(Ours(kind, workload.config), workload))
        real.append(drive(Real(kind, workload.config), workload))
        if ours[-1].decisions != real[-1].decisions:
            raise RuntimeError(f"{workload.name}: the schedulers decide differently")
        ours[-1].decisions = real[-1].decisions = []
    mine, theirs = _fastest(ours), _fastest(real)
    return {
        "kind": kind,
        "workload": workload.name,
        "request_steps": ours[0].num_request_steps,
        "ours_us": round(mine, 3),
        "vllm_us": round(theirs, 3),
        "ratio": round(theirs / mine, 2),
    }


def add_arguments(parser: ArgumentParser) -> None:
    """Scheduler kinds, repetitions."""
    kinds = ("base", "async", "neuron", "neuron_async")
    parser.add_argument("--kind", nargs="+", default=["base"], choices=kinds, help="(base)")
    parser.add_argument("--repetitions", type=int, default=5, help="the fastest counts (5)")


def run(options: Namespace) -> int:
    """Print a line as soon as it is measured; with --json one object per line."""
    if options.repetitions < 1:
        options.parser.error(f"--repetitions={options.repetitions}: must be at least 1")
    # vLLM reads these when it is first imported.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    try:
        importlib.import_module("vllm")
    except ModuleNotFoundError as error:
        raise MissingExtraError(str(error.name), "vllm") from error
    if not options.json:
        print(f"{'microseconds per request-step':<56}{'ours':>8}{'vLLM':>8}{'ratio':>8}")
    for kind in options.kind:
        for workload in workloads():
            line = compare(kind, workload, options.repetitions)
            if options.json:
                print(json.dumps(line), flush=True)
                continue
            name = f"{kind}: {line['workload']}"
            times = f"{line['ours_us']:>8.2f}{line['vllm_us']:>8.2f}{line['ratio']:>7.1f}x"
            for part in textwrap.wrap(name, 56)[:-1]:
                print(part)
            print(f"{textwrap.wrap(name, 56)[-1]:<56}{times}", flush=True)
    return 0
