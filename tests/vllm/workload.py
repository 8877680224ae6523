"""Hypothesis strategies for workloads, and the engine loop that plays them on a recorder.

A workload is a list of actions that refer to requests by number, so that shrinking an action does
not change the meaning of the others. Tokens depend on request, position and a seed alone.
"""

import zlib
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from segattn.tests.vllm.recorder import Recorder, Sampled

EOS = 2
Action = tuple[Any, ...]


@dataclass(frozen=True)
class Workload:
    """Scheduler configuration, actions in order, and the seed of the model's tokens."""

    config: dict[str, Any]
    actions: list[Action]
    seed: int


@st.composite
def configs(draw: st.DrawFn, base: bool) -> dict[str, Any]:
    """Small configurations in which memory, budget and slots are all scarce at times.

    For a Neuron kind drafts come without prefix caching: after a hit vLLM pads the last token of a
    prompt to a row of drafts, which our Neuron kinds do not (docs/decisions.md).
    """
    block_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    max_model_len = draw(st.integers(6, 48))
    chunked = draw(st.booleans() | st.just(True))
    max_num_seqs = draw(st.integers(1, 5))
    smallest_budget = max(max_num_seqs, 2) if chunked else max_model_len
    budget = draw(st.integers(smallest_budget, smallest_budget + 24))
    blocks_per_request = -(-max_model_len // block_size)
    num_speculative_tokens = draw(st.just(0) | st.integers(1, 3))
    may_cache = base or not num_speculative_tokens
    config = {
        "block_size": block_size,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": budget,
        "num_blocks": 1 + draw(st.integers(2, max(3, 3 * blocks_per_request))),
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": may_cache and draw(st.sampled_from([True, True, False])),
        "policy": draw(st.sampled_from(["fcfs", "priority"])),
        "scheduler_reserve_full_isl": draw(st.booleans()),
        "watermark": draw(st.sampled_from([0.0, 0.0, 0.1, 0.4])),
        "long_prefill_token_threshold": 0,
        "num_speculative_tokens": num_speculative_tokens,
    }
    if num_speculative_tokens:
        config["num_lookahead_tokens"] = draw(st.sampled_from([0, num_speculative_tokens]))
    if chunked:
        # Ours refuses a threshold without chunking, and one below a row of drafts, at which vLLM
        # fails an assertion.
        smallest, largest = 1 + num_speculative_tokens, min(12, max_model_len)
        if smallest <= largest and draw(st.booleans()):
            threshold = draw(st.integers(smallest, largest))
            config["long_prefill_token_threshold"] = threshold
        config["max_num_scheduled_tokens"] = draw(st.none() | st.integers(1, budget))
    return config


@st.composite
def _additions(draw: st.DrawFn, longest_prompt: int) -> Action:
    # Repetitions of few tokens share prefixes.
    stem = draw(st.sampled_from([(3,), (3,), (4, 5), (3, 4, 6)]))
    length = draw(st.integers(1, longest_prompt))
    tail = draw(st.lists(st.integers(3, 9), max_size=2))
    given: dict[str, Any] = {
        "prompt": ([*stem * length][:length] + tail)[:longest_prompt],
        "max_tokens": draw(st.integers(1, 14)),
        "arrival": float(draw(st.integers(0, 3))),
        "priority": draw(st.integers(0, 2)),
    }
    if draw(st.booleans()):
        given["eos"] = None
    if draw(st.integers(0, 3)) == 0:
        given["stop"] = draw(st.lists(st.integers(3, 12), max_size=2))
    if draw(st.integers(0, 3)) == 0:
        given["min_tokens"] = draw(st.integers(0, given["max_tokens"]))
    if draw(st.integers(0, 3)) == 0:
        given["salt"] = draw(st.sampled_from(["x", "y"]))
    if draw(st.integers(0, 5)) == 0:
        given["skip_read"] = True
    return ("add", given)


@st.composite
def workloads(draw: st.DrawFn, base: bool) -> Workload:
    """A configuration, and phases in which requests come and phases in which they go."""
    config = draw(configs(base))
    addition = _additions(config["max_model_len"] - 1)
    rare: st.SearchStrategy[Action] = st.one_of(
        st.tuples(st.just("abort"), st.integers(0, 9)),
        st.tuples(st.just("abort in flight"), st.integers(0, 9)),
        st.just(("deliver",)),
        st.tuples(st.just("reset"), st.booleans()),
        st.tuples(st.just("pause"), st.sampled_from([0, 0, 1, 2])),
    )
    busy = st.lists(st.one_of(addition, st.just(("steps", 2)), addition), min_size=4, max_size=10)
    quiet = st.lists(st.one_of(st.just(("steps", 3)), rare, addition), min_size=3, max_size=10)
    phases = draw(st.lists(st.tuples(busy, quiet), min_size=1, max_size=4))
    actions = [action for phase in phases for part in phase for action in part]
    return Workload(config, actions, draw(st.integers(0, 3)))


def play(recorder: Recorder, workload: Workload, depth: int, max_final_steps: int) -> None:
    """Perform the actions with up to `depth` steps in flight, then step until idle at last."""
    names: list[str] = []
    for name, *given in workload.actions:
        match name:
            case "add":
                names.append(f"r{len(names)}")
                recorder.add(id=names[-1], **given[0])
            case "steps":
                for _ in range(given[0]):
                    _step(recorder, workload.seed, depth)
            case "deliver":
                if recorder.in_flight:
                    _deliver(recorder, workload.seed)
            case "abort" if names:
                recorder.abort([names[given[0] % len(names)]])
            case "abort in flight" if names:
                _launch(recorder, workload.seed)
                recorder.abort([names[given[0] % len(names)]])
                while len(recorder.in_flight) >= depth:
                    _deliver(recorder, workload.seed)
            case "reset":
                recorder.reset(given[0])
            case "pause":
                recorder.pause(given[0])
    recorder.pause(0)
    for _ in range(max_final_steps):
        if not recorder.scheduler.has_requests():
            break
        _step(recorder, workload.seed, depth)
    while recorder.in_flight:
        _deliver(recorder, workload.seed)


def _step(recorder: Recorder, seed: int, depth: int) -> None:
    _launch(recorder, seed)
    while len(recorder.in_flight) >= depth:
        _deliver(recorder, seed)


def _launch(recorder: Recorder, seed: int) -> None:
    output = recorder.schedule()
    sampled: Sampled = []
    for request_id in output.num_scheduled_tokens:
        request = recorder.scheduler.requests[request_id]
        if request.is_prefill_chunk:
            sampled.append([request_id, []])
            continue
        drafts = output.scheduled_spec_decode_tokens.get(request_id, ())
        position = request.num_computed_tokens - len(drafts)
        num_accepted = _number(request_id, position, seed, 1) % (len(drafts) + 1)
        tokens = [_token(request_id, position + i, seed) for i in range(num_accepted + 1)]
        sampled.append([request_id, tokens])
    recorder.launch(output, sampled)


def _deliver(recorder: Recorder, seed: int) -> None:
    _, output, sampled = recorder.in_flight[0]
    recorder.update()
    most = recorder.config.num_speculative_tokens
    is_async = recorder.scheduler.scheduler_config.async_scheduling
    if not most or is_async or not output.num_scheduled_tokens:
        return
    drafts: Sampled = []
    for request_id, tokens in sampled:
        if tokens:
            count = _number(request_id, len(tokens), seed, 2) % (most + 1)
            drafts.append([request_id, [7] * count])
    recorder.drafts(drafts)


def _number(request_id: str, position: int, seed: int, purpose: int) -> int:
    return zlib.crc32(f"{request_id} {position} {seed} {purpose}".encode())


def _token(request_id: str, position: int, seed: int) -> int:
    number = _number(request_id, position, seed, 0)
    return EOS if number % 23 == 0 else 3 + (number >> 8) % 10
