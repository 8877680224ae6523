"""A runner of a random model, and scheduled steps for it, made by hand."""

from dataclasses import replace

import numpy as np

from segattn.runner.compile_plan import CompilePlan
from segattn.runner.launch import StepResult
from segattn.runner.llama import Llama
from segattn.runner.model_runner import ModelRunner
from segattn.runner.paged_cache import PagedKVCache
from segattn.runner.plain_forward import plain_logits
from segattn.scheduler import CachedRequestData, NewRequestData, SchedulerConfig, SchedulerOutput
from segattn.scheduler.output import StepKind
from segattn.tests.runner.random_model import CONFIG, random_weights

SCHEDULING = SchedulerConfig(
    max_num_seqs=4,
    max_num_batched_tokens=150,
    max_model_len=200,
    block_size=16,
    num_blocks=64,
    num_batched_tokens_buckets=[20, 128, 150],
)
PROMPT = [5, 9, 2, 77, 31, 8, 300, 12, 55, 6, 41, 19, 23, 101, 7, 3, 250, 11, 90, 14]


def poisoned_model() -> Llama:
    """A model whose padding token is NaN, so that every padded lane of every layer is NaN."""
    weights = random_weights()
    weights.embedding[0] = np.nan
    return Llama(CONFIG, weights)


def poisoned_runner(model: Llama, *, drafting: bool = False) -> ModelRunner:
    """A runner whose whole cache, block 0 included, is NaN before the first step."""
    config = replace(SCHEDULING, num_speculative_tokens=3) if drafting else SCHEDULING
    cache = PagedKVCache(CONFIG, SCHEDULING.num_blocks, SCHEDULING.block_size, model.dtype)
    cache.keys.fill(np.nan)
    cache.values.fill(np.nan)
    return ModelRunner(model, CompilePlan(config), cache, kv_segment_size=128)


def greedy_tokens(model: Llama, prompt: list[int], num_tokens: int) -> list[int]:
    """Continuation by the plain forward pass."""
    known = list(prompt)
    for _ in range(num_tokens):
        known.append(int(plain_logits(model, known, first=len(known) - 1)[0].argmax()))
    return known[len(prompt) :]


NO_CACHED = CachedRequestData([], set(), [], {}, [], [], [])


def step(
    tokens: dict[str, int],
    kind: StepKind,
    *,
    new: list[NewRequestData] | None = None,
    cached: CachedRequestData = NO_CACHED,
    padded: dict[str, int] | None = None,
    finished: set[str] | None = None,
    drafts: dict[str, list[int]] | None = None,
) -> SchedulerOutput:
    """A scheduler output of real token counts `tokens`."""
    return SchedulerOutput(
        new or [], cached, tokens, sum(tokens.values()), drafts or {}, [0], finished or set(),
        set(), step_kind=kind, num_scheduled_tokens_padded=padded or tokens,
    )  # fmt: skip


def prefill(
    req_id: str, prompt: list[int], blocks: list[int], num_tokens: int, prior: int = 0
) -> SchedulerOutput:
    """First chunk of a request."""
    new = NewRequestData(req_id, prompt, (blocks,), prior)
    bucket = next(b for b in SCHEDULING.prefill_buckets if b >= num_tokens)
    return step({req_id: num_tokens}, "prefill", new=[new], padded={req_id: bucket})


def go_on(
    computed: dict[str, int],
    num_tokens: int = 1,
    *,
    padded: int | None = None,
    new_blocks: dict[str, list[int]] | None = None,
    resumed: dict[str, list[int]] | None = None,
    drafts: dict[str, list[int]] | None = None,
    num_outputs: int = 99,
) -> SchedulerOutput:
    """A further chunk (`padded`), or a decode, of requests with `computed` tokens in the cache.

    `resumed` gives all tokens of requests that start anew.
    """
    ids = list(computed)
    blocks: list[tuple[list[int], ...] | None] = [
        (new_blocks[i],) if new_blocks and i in new_blocks else None for i in ids
    ]
    cached = CachedRequestData(
        ids, set(resumed or ()), [], resumed or {}, blocks, list(computed.values()),
        [num_outputs] * len(ids),
    )  # fmt: skip
    tokens = {i: num_tokens + len((drafts or {}).get(i, ())) for i in ids}
    kind: StepKind = "prefill" if padded else "decode"
    padded_counts = dict.fromkeys(ids, padded) if padded else tokens
    return step(tokens, kind, cached=cached, padded=padded_counts, drafts=drafts)


def sampled(result: StepResult) -> list[list[int]]:
    """Tokens of a step."""
    return result.output.sampled_token_ids
