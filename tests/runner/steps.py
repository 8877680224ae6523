"""Hand-made steps."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from segattn.runner.report import FORMAT
from segattn.runner.step import Step


def step(**changed: Any) -> Step:
    """A prefill of 100 tokens in a bucket of 128, unless `changed` says otherwise."""
    values: dict[str, Any] = {
        "index": 0,
        "state": "ACTIVE_PREFILL",
        "graph": "prefill_s128",
        "request_ids": ("a",),
        "num_tokens": 100,
        "num_tokens_padded": 128,
        "num_prior_tokens": 0,
        "num_new_tokens": 1,
        "num_running": 1,
        "num_waiting": 2,
        "kv_cache_usage": 0.25,
        "start_seconds": 1.0,
        "prepare_seconds": 0.125,
        "run_start_seconds": 1.125,
        "run_seconds": 0.5,
    }
    return Step(**(values | changed))


DECODE = step(
    index=1,
    state="ACTIVE_DECODE",
    graph="decode_b4_w8",
    request_ids=("a", "<b>"),
    num_tokens=2,
    num_tokens_padded=4,
    num_running=2,
    num_waiting=0,
    kv_cache_usage=0.5,
    start_seconds=1.5,
    prepare_seconds=0.125,
    run_start_seconds=1.75,
    run_seconds=0.25,
)


def report_of(steps: Sequence[Step], prefill_buckets: Sequence[int] = (128,)) -> dict[str, Any]:
    """A report of `segattn generate` with these steps."""
    config = {"prefill_buckets": list(prefill_buckets), "decode_buckets": [1, 4]}
    return {"format": FORMAT, "config": config, "steps": [asdict(s) for s in steps]}
