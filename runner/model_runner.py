"""Executes a scheduled step: pads it to a compiled shape, runs the model, samples greedily.

The runner takes counts, padded counts and block ids from the SchedulerOutput as they are. Of each
request it remembers the tokens and blocks it was told, as vLLM's runner does.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ..scheduler import CachedRequestData, ModelRunnerOutput, SchedulerOutput
from ..scheduler.policy import is_prefill
from .compile_plan import CompilePlan, GraphShape
from .llama import Float32Array, Llama
from .padding import DecodeInputs, DecodeRow, PrefillInputs, decode_inputs, prefill_inputs
from .paged_cache import PagedKVCache


@dataclass
class _RequestState:
    num_prompt_tokens: int
    token_ids: list[int]
    """Prompt and sampled tokens."""
    block_ids: list[int]
    num_computed_tokens: int
    """Tokens in the cache before the step at hand."""


@dataclass
class StepResult:
    """What a step gave back."""

    output: ModelRunnerOutput
    shape: GraphShape | None = None
    """The compiled shape that ran; None when nothing was scheduled."""
    num_prior_tokens: int = 0
    """Tokens of the scheduled requests that were in the cache before."""
    logits: dict[str, Float32Array] = field(default_factory=dict)
    """Logits [vocab] behind each sampled token."""


class ModelRunner:
    """A model, its paged cache and the requests that live in it."""

    def __init__(
        self,
        model: Llama,
        plan: CompilePlan,
        cache: PagedKVCache,
        *,
        kv_segment_size: int,
    ) -> None:
        self.plan = plan
        self.cache = cache
        self._model = model
        self._block_size = cache.block_size
        self._kv_segment_size = kv_segment_size
        self._requests: dict[str, _RequestState] = {}

    def warm_up(self) -> Iterator[GraphShape]:
        """Run each shape of the plan once on padding alone, yielding it; the cache stays as it is.

        Layers share their shapes, so the kernels of the first layer compile for all.
        """
        config = self._model.config
        for shape in self.plan.shapes:
            q, k, v = (
                np.zeros((heads, shape.rows, config.head_dim), self._model.dtype)
                for heads in (config.num_q_heads, config.num_kv_heads, config.num_kv_heads)
            )
            if shape.kind == "decode":
                attend = self.cache.decode_attention(self._decode_inputs([], shape))
            else:
                # An unused table makes the kernel read nothing whatever the prior.
                prior_tokens = self._block_size if shape.kind == "segmented_prefill" else 0
                inputs = self._prefill_inputs([], prior_tokens, [], shape)
                attend = self.cache.prefill_attention(inputs, self._kv_segment_size)
            attend(0, q, k, v)
            yield shape

    def execute_model(self, scheduled: SchedulerOutput) -> StepResult:
        """Run one step; sampled tokens come in scheduling order.

        RuntimeError for a step that mixes prefill and decode or prefills two requests, and for a
        shape outside the plan.
        """
        for req_id in scheduled.finished_req_ids:
            self._requests.pop(req_id, None)
        self._update_states(scheduled)
        req_ids = list(scheduled.num_scheduled_tokens)
        prefills = [req_id for req_id in req_ids if self._is_prefill(self._requests[req_id])]
        if prefills and len(prefills) < len(req_ids):
            raise RuntimeError(
                f"mixed batch: prefill of {prefills} and decode of "
                f"{[req_id for req_id in req_ids if req_id not in prefills]} in one step"
            )
        if len(prefills) > 1:
            raise RuntimeError(f"prefill of {prefills} in one step: a prefill graph takes one")
        result = StepResult(
            ModelRunnerOutput(req_ids, [[] for _ in req_ids]),
            num_prior_tokens=sum(self._requests[i].num_computed_tokens for i in req_ids),
        )
        if prefills:
            self._prefill(prefills[0], scheduled, result)
        elif req_ids:
            self._decode(req_ids, result)
        for tokens, req_id in zip(result.output.sampled_token_ids, req_ids, strict=True):
            if req_id in result.logits:
                tokens.append(greedy(req_id, result.logits[req_id]))
                self._requests[req_id].token_ids += tokens
        return result

    def _update_states(self, scheduled: SchedulerOutput) -> None:
        """Learn the new requests, and the new blocks and progress of the known ones."""
        for new in scheduled.scheduled_new_reqs:
            self._requests[new.req_id] = _RequestState(
                len(new.prompt_token_ids),
                list(new.prompt_token_ids),
                list(new.block_ids[0]),
                new.num_computed_tokens,
            )
        cached: CachedRequestData = scheduled.scheduled_cached_reqs
        for req_id, new_blocks, num_computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            state = self._requests[req_id]
            if req_id in cached.resumed_req_ids:
                state.block_ids = []
            if new_blocks is not None:
                state.block_ids += new_blocks[0]
            state.num_computed_tokens = num_computed

    def _is_prefill(self, state: _RequestState) -> bool:
        return is_prefill(state.num_computed_tokens, state.num_prompt_tokens, len(state.token_ids))

    def _prefill(self, req_id: str, scheduled: SchedulerOutput, result: StepResult) -> None:
        state = self._requests[req_id]
        if scheduled.num_scheduled_tokens_padded is None:
            raise RuntimeError("the scheduler gave no padded token counts: use a Neuron kind")
        prior = state.num_computed_tokens
        end = prior + scheduled.num_scheduled_tokens[req_id]
        shape = self.plan.prefill(scheduled.num_scheduled_tokens_padded[req_id], prior)
        inputs = self._prefill_inputs(state.token_ids[prior:end], prior, state.block_ids, shape)
        attend = self.cache.prefill_attention(inputs, self._kv_segment_size)
        hidden = self._model.forward(inputs.input_ids, inputs.positions, attend)
        result.shape = shape
        # Earlier chunks have nothing to sample: the next token is known.
        if end == len(state.token_ids):
            last = inputs.num_tokens - 1
            result.logits[req_id] = self._model.logits(hidden[last : last + 1])[0]

    def _decode(self, req_ids: list[str], result: StepResult) -> None:
        states = [self._requests[req_id] for req_id in req_ids]
        rows = [
            DecodeRow(state.token_ids[-1], len(state.token_ids), state.block_ids)
            for state in states
        ]
        shape = self.plan.decode(len(rows), max(row.context_len for row in rows))
        inputs = self._decode_inputs(rows, shape)
        attend = self.cache.decode_attention(inputs)
        hidden = self._model.forward(inputs.input_ids, inputs.positions, attend)
        result.shape = shape
        result.logits.update(zip(req_ids, self._model.logits(hidden[: len(rows)]), strict=True))

    def _prefill_inputs(
        self, token_ids: list[int], prior_tokens: int, block_ids: list[int], shape: GraphShape
    ) -> PrefillInputs:
        return prefill_inputs(
            token_ids,
            prior_tokens,
            block_ids,
            bucket=shape.bucket,
            max_blocks=shape.num_blocks,
            block_size=self._block_size,
        )

    def _decode_inputs(self, rows: list[DecodeRow], shape: GraphShape) -> DecodeInputs:
        return decode_inputs(
            rows, bucket=shape.bucket, width=shape.num_blocks, block_size=self._block_size
        )


def greedy(req_id: str, logits: Float32Array) -> int:
    """Most likely token, the smallest id on a tie. RuntimeError when a logit is not finite."""
    if not np.isfinite(logits).all():
        raise RuntimeError(f"request {req_id!r}: logits are not finite, no token can be chosen")
    return int(logits.argmax())
