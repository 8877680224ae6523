"""Hypothesis strategies: small scheduler configurations and requests that collide a lot.

Two or three token values and short blocks make prefix hits, evictions and preemptions frequent;
limits are drawn so that every bound of a scheduler is met often.
"""

from collections.abc import Mapping
from itertools import cycle, islice
from typing import Any

from ...reference.extras import MissingExtraError
from ...reference.paging import num_blocks_for
from .records import EOS
from .subject import Subject

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise MissingExtraError("hypothesis", "test") from error

TOKENS = (5, 6, 7)


@st.composite
def configs(
    draw: st.DrawFn, subject: Subject, fixed: Mapping[str, Any], *, serves_all: bool
) -> Any:
    """Keywords of SchedulerConfig, those of `fixed` as they are given.

    serves_all: any request of max_model_len must fit into the KV cache, and a step's budget holds
    one token with its drafts: vLLM never starts a padded request that does not fit.
    """

    def some(name: str, strategy: st.SearchStrategy[Any]) -> Any:
        return fixed[name] if name in fixed else draw(strategy)

    max_model_len = some("max_model_len", st.integers(3, 24))
    max_num_seqs = some("max_num_seqs", st.integers(1, 4))
    chunked = some("enable_chunked_prefill", st.booleans())
    num_drafts = some("num_speculative_tokens", st.sampled_from([0, 0, 1, 3]))
    least_step = 1 + num_drafts if serves_all else 1
    least_budget = max(max_num_seqs, least_step if chunked else max_model_len)
    budget = some("max_num_batched_tokens", st.integers(least_budget, least_budget + 12))
    block_size = some("block_size", st.integers(1, 5))
    whole = num_blocks_for(max_model_len, block_size)
    least_blocks = 1 + (whole if serves_all else (whole + 1) // 2)
    config: dict[str, Any] = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": budget,
        "max_model_len": max_model_len,
        "block_size": block_size,
        "num_blocks": draw(st.integers(least_blocks, 1 + 4 * whole)),
        "enable_prefix_caching": draw(st.sampled_from([True, True, False])),
        "enable_chunked_prefill": chunked,
        "policy": draw(st.sampled_from(["fcfs", "priority"])),
        "scheduler_reserve_full_isl": draw(st.booleans()),
        "watermark": draw(st.sampled_from([0.0, 0.0, 0.1, 0.4])),
    }
    if draw(st.booleans()) and chunked:
        config["max_num_scheduled_tokens"] = draw(st.integers(min(least_step, budget), budget))
    config["num_speculative_tokens"] = num_drafts
    if chunked:
        thresholds = st.sampled_from([0, 0, num_drafts + 1, num_drafts + 3])
        config["long_prefill_token_threshold"] = draw(thresholds)
    if num_drafts:
        config["num_lookahead_tokens"] = draw(st.sampled_from([0, num_drafts]))
    if subject.is_neuron and draw(st.booleans()):
        last = min(budget, max_model_len)
        inner = draw(st.sets(st.integers(1, last), max_size=3))
        config["num_batched_tokens_buckets"] = sorted(inner | {last})
    return {**config, **fixed}


@st.composite
def policies(draw: st.DrawFn, fixed: Mapping[str, Any]) -> Any:
    """Fields of a NeuronPolicy that differ from the default one, those of `fixed` as given."""
    changes: dict[str, Any] = {}
    if "design" in fixed:
        return dict(fixed)
    if draw(st.booleans()):
        changes["max_consecutive_prefills"] = draw(st.none() | st.integers(1, 3))
        changes["max_consecutive_decodes"] = draw(st.integers(1, 3))
    if draw(st.booleans()):
        changes["kv_admission"] = draw(st.sampled_from(["reserved", "worst_case"]))
    return {**changes, **fixed}


@st.composite
def requests(draw: st.DrawFn, max_prompt: int, max_model_len: int, name: str, now: int) -> Any:
    """The argument of an `add` event; one in a while is a request that can never be served."""
    length = draw(st.integers(1, max_prompt))
    text = draw(st.sampled_from([TOKENS[:1], TOKENS[:1], TOKENS[:2], TOKENS[1:]]))
    request: dict[str, Any] = {
        "id": name,
        "prompt": list(islice(cycle(text), length)),
        "max_tokens": draw(st.integers(1, max_model_len)),
        "arrival": float(draw(st.integers(0, now))),
    }
    options: dict[str, st.SearchStrategy[Any]] = {
        "priority": st.integers(0, 2),
        "eos": st.none(),
        "stop": st.just([TOKENS[2]]),
        "min_tokens": st.integers(1, max_model_len // 2),
        "salt": st.sampled_from(["x", "y"]),
        "skip_read": st.just(True),
    }
    for option in sorted(draw(st.sets(st.sampled_from(sorted(options)), max_size=2))):
        request[option] = draw(options[option])
    return request


def sampled_tokens(count: int) -> st.SearchStrategy[list[int]]:
    """What the model returns for one request: `count` tokens, seldom one that ends it."""
    values = (*TOKENS[:2], *TOKENS[:2], *TOKENS[:2], TOKENS[2], EOS)
    return st.lists(st.sampled_from(values), min_size=count, max_size=count)
