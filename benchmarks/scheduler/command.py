"""Our scheduler and that of the installed vLLM, in one process.

Both get the same requests and the same sampled tokens; their decisions are compared step by step.
Printed are microseconds per request-step: time to make and add the requests (block hashing
included), to schedule and to update, divided by scheduled requests; or the time to abort requests,
divided by their number. The model's part is not timed.
Repetitions alternate between the two. Each does the same in every repetition, so the fastest time
of each addition and step is taken: other load on the machine only ever adds to it.
"""

import gc
import json
import os
import textwrap
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from segattn.scheduler import ModelRunnerOutput, RequestStatus, Scheduler
from segattn.scheduler.config import SchedulerConfig
from segattn.scheduler.testing.trace import make_request, make_scheduler

Decision = tuple[Any, ...]


@dataclass(frozen=True)
class Workload:
    """Requests given at the start, after `warm` if any; at most `max_steps` timed steps.

    `num_waiting` short requests more are added untimed, `num_arrivals` are timed before each step.
    With `num_aborts` nothing is timed but the call that ends so many, after the untimed steps.
    """

    name: str
    config: SchedulerConfig
    prompts: list[list[int]]
    max_tokens: int
    warm: list[int] | None = None
    """A prompt that runs to its end first, untimed, and fills the prefix cache."""
    num_untimed_steps: int = 0
    max_steps: int = 1 << 30
    num_waiting: int = 0
    num_arrivals: int = 0
    num_aborts: int = 0
    most_repetitions: int = 1 << 30


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


def workloads() -> Iterator[Workload]:
    """The lines of the table."""
    for block_size in (16, 128):
        for num_decodes in (1, 8, 256, 1024):
            yield _decodes(num_decodes, block_size)
        yield _prompts(f"8192-token prompts in chunks of 2048, blocks of {block_size}", block_size)
        yield _prompts(
            f"8192-token prompts, all but 16 tokens cached, blocks of {block_size}",
            block_size,
            shared=8192 - 16,
        )
    yield replace(
        _decodes(256, 16, seats=512), name="256 decodes, one arrival in every step", num_arrivals=1
    )
    yield replace(_long_prompt(), name="128k-token prompt, cold")
    yield replace(
        _long_prompt(), name="128k-token prompt, cached", warm=[*_long_prompt().prompts[0]]
    )
    for policy in ("fcfs", "priority"):
        decodes = replace(_decodes(256, 16, policy=policy), num_waiting=100_000, most_repetitions=2)
        yield replace(decodes, name=f"256 decodes, 100,000 waiting, {policy}")
        for num_aborts in (1, 128):
            name = f"{num_aborts} aborted of 256 decodes, 100,000 waiting, {policy}"
            yield replace(decodes, name=name, num_aborts=num_aborts)


def _long_prompt() -> Workload:
    config = SchedulerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=8192,
        max_model_len=132_000,
        block_size=16,
        num_blocks=2 * 132_000 // 16,
    )
    prompt = [(j * 7) % 900 + 10 for j in range(128_000)]
    return Workload("", config, [prompt], max_tokens=4)


def _decodes(
    num_decodes: int, block_size: int, seats: int | None = None, policy: str = "fcfs"
) -> Workload:
    config = SchedulerConfig(
        max_num_seqs=seats or num_decodes,
        max_num_batched_tokens=max(2048, num_decodes),
        max_model_len=4096,
        block_size=block_size,
        num_blocks=(seats or num_decodes) * (4096 // block_size) + 2,
        policy=policy,
    )
    prompts = [[(i * 131 + j) % 900 + 10 for j in range(128)] for i in range(num_decodes)]
    return Workload(
        f"{num_decodes} decodes, blocks of {block_size}",
        config,
        prompts,
        max_tokens=3000,
        # The prefills, and 20 decodes.
        num_untimed_steps=num_decodes * 128 // 2048 + 21,
        max_steps=400 if num_decodes < 100 else 100,
    )


def _prompts(name: str, block_size: int, shared: int = 0) -> Workload:
    config = SchedulerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=2048,
        max_model_len=16384,
        block_size=block_size,
        num_blocks=8 * (16384 // block_size) + 8192 // block_size + 2,
    )
    stem = [(j * 7) % 900 + 10 for j in range(8192)]
    prompts = [
        stem[:shared] + [(i * 7919 + j * 13) % 50000 + 10 for j in range(8192 - shared)]
        for i in range(24)
    ]
    return Workload(name, config, prompts, max_tokens=4, warm=stem if shared else None)


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
        for number in range(workload.num_waiting):
            side.add(_short(f"w{number}"))
        decisions: list[Decision] = []
        num_request_steps = 0
        for number in range(workload.num_untimed_steps + workload.max_steps):
            if not side.scheduler.requests:
                break
            is_timed = number >= workload.num_untimed_steps
            if is_timed and workload.num_aborts:
                ids = [request.request_id for request in side.scheduler.running]
                begin = perf_counter()
                side.abort(ids[: workload.num_aborts])
                return Run([perf_counter() - begin], workload.num_aborts, decisions)
            begin = perf_counter()
            for arrival in range(workload.num_arrivals * is_timed):
                side.add(_short(f"a{number}-{arrival}"))
            arrival_seconds = perf_counter() - begin
            step_seconds, decision = _step(side)
            decisions.append(decision)
            if is_timed:
                seconds.append(arrival_seconds + step_seconds)
                num_request_steps += len(decision[0])
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
    parser.add_argument("--repetitions", type=int, default=9, help="the fastest counts (9)")


def run(options: Namespace) -> int:
    """Print a line as soon as it is measured; with --json one object per line."""
    if options.repetitions < 1:
        options.parser.error(f"--repetitions={options.repetitions}: must be at least 1")
    # vLLM reads these when it is first imported.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
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
