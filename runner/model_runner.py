"""Executes scheduled steps: pads each to a compiled shape, runs the model, samples greedily.

The runner does what the SchedulerOutput says, field by field: token counts, padded counts, blocks,
drafts and phase are never decided again. Of each request it remembers the tokens and blocks that it
was told, as vLLM's runner does, and where the scheduler's tokens differ, the scheduler's hold.

A step is submitted, then collected. With `asynchronous` a step may be submitted while the one
before it runs: a decode batch of the same requests takes its tokens from that step, any other step
that needs such a token waits for them first.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from itertools import takewhile
from time import perf_counter

import numpy as np

from ..scheduler import ModelRunnerOutput, SchedulerOutput
from .compile_plan import CompilePlan, GraphShape
from .launch import Launch, RequestState, RowError, StepResult, StepRow
from .llama import Float32Array, Llama
from .padding import DecodeInputs, PrefillInputs, Row, decode_inputs, prefill_inputs
from .paged_cache import PagedKVCache


class ModelRunner:
    """A model, its paged cache and the requests that live in it."""

    def __init__(
        self,
        model: Llama,
        plan: CompilePlan,
        cache: PagedKVCache,
        *,
        kv_segment_size: int,
        asynchronous: bool = False,
    ) -> None:
        self.plan = plan
        self.cache = cache
        self._model = model
        self._kv_segment_size = kv_segment_size
        self._requests: dict[str, RequestState] = {}
        self._executor: Executor | None = ThreadPoolExecutor(1) if asynchronous else None
        self._latest: Launch | None = None

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
            # An unused table makes the kernel read nothing whatever the prior.
            prior_tokens = self.cache.block_size if shape.kind == "segmented_prefill" else 0
            rows = [] if shape.kind == "decode" else [Row([], prior_tokens, [])]
            self.cache.attention(self._inputs(rows, shape), self._kv_segment_size)(0, q, k, v)
            yield shape

    def execute_model(self, scheduled: SchedulerOutput) -> StepResult:
        """Run one step to its end; sampled tokens come in scheduling order."""
        launch = self.submit(scheduled)
        try:
            return self.collect(launch)
        except BaseException:
            self.take_back([launch])
            raise

    def submit(self, scheduled: SchedulerOutput) -> Launch:
        """Prepare a step and start it.

        RowError for a request with a token or block that does not exist, RuntimeError for a step
        that mixes prefill and decode or prefills two requests, for counts that do not fit each
        other and for a shape outside the plan. The runner is then as it was before.
        """
        launch = Launch(scheduled)
        try:
            self._update_states(scheduled, launch)
            self._prepare(scheduled, launch)
        except BaseException:
            self._restore_blocks(launch)
            raise
        return launch

    def collect(self, launch: Launch) -> StepResult:
        """Wait for a step and keep its tokens; what it raised is raised here.

        RowError when logits or hidden states of a request are not finite.
        """
        result = launch.future.result()
        for row, tokens in zip(launch.rows, result.output.sampled_token_ids, strict=True):
            if row.samples:
                row.state.token_ids[row.prior_tokens + row.num_known :] = tokens
        if launch is self._latest:
            self._latest = None
        return result

    def take_back(self, launches: Sequence[Launch]) -> None:
        """Forget steps whose results will not be used, given from the oldest to the newest.

        Returns when none of them runs any more.
        """
        wait([launch.future for launch in launches if not launch.future.cancel()])
        for launch in reversed(launches):
            self._restore_blocks(launch)
        self._latest = None

    def _update_states(self, scheduled: SchedulerOutput, launch: Launch) -> None:
        """Learn the new requests, and the tokens, blocks and progress of the known ones."""
        for req_id in scheduled.finished_req_ids:
            self._requests.pop(req_id, None)
        for new in scheduled.scheduled_new_reqs:
            self._requests[new.req_id] = RequestState(
                len(new.prompt_token_ids),
                list(new.prompt_token_ids),
                list(new.block_ids[0]),
                new.num_computed_tokens,
            )
        cached = scheduled.scheduled_cached_reqs
        for req_id, new_blocks, num_computed, num_outputs in zip(
            cached.req_ids,
            cached.new_block_ids,
            cached.num_computed_tokens,
            cached.num_output_tokens,
            strict=True,
        ):
            state = self._requests[req_id]
            if req_id in cached.all_token_ids:
                # A state of its own: a token in flight for the old one may have been discarded.
                tokens = list(cached.all_token_ids[req_id])
                state = RequestState(state.num_prompt_tokens, tokens, state.block_ids, 0)
                self._requests[req_id] = state
            del state.token_ids[state.num_prompt_tokens + num_outputs :]
            launch.old_block_ids.append((state, state.block_ids))
            old_blocks = [] if req_id in cached.resumed_req_ids else state.block_ids
            if new_blocks is not None:
                state.block_ids = old_blocks + new_blocks[0]
            state.num_computed_tokens = num_computed

    def _restore_blocks(self, launch: Launch) -> None:
        """The blocks alone: everything else of a step is sent again when it is scheduled again."""
        for state, block_ids in launch.old_block_ids:
            state.block_ids = block_ids

    def _prepare(self, scheduled: SchedulerOutput, launch: Launch) -> None:
        """Lay the step into a shape and hand it to the executor."""
        kind = scheduled.step_kind
        if kind == "mixed":
            raise RuntimeError(f"prefill and decode in one step: {scheduled.num_scheduled_tokens}")
        if kind == "prefill" and len(launch.req_ids) > 1:
            raise RuntimeError(f"prefill of {launch.req_ids}: a prefill graph takes one request")
        before = self._latest
        rows = launch.rows = self._rows(scheduled)
        if before is not None and not _follows(rows, before):
            self.collect(before)
            before, rows = None, self._rows(scheduled)
            launch.rows = rows
        self._check_rows(rows)
        if not rows:
            launch.future.set_result(StepResult(ModelRunnerOutput([], [])))
            return
        if kind == "prefill":
            padded = scheduled.num_scheduled_tokens_padded
            if padded is None:
                raise RuntimeError("the scheduler gave no padded token counts: use a Neuron kind")
            shape = self.plan.prefill(padded[rows[0].req_id], rows[0].prior_tokens)
        else:
            most_tokens = max(row.prior_tokens + len(row.token_ids) for row in rows)
            shape = self.plan.decode(len(rows), most_tokens)
        inputs = self._inputs(rows, shape)
        launch.before = before
        if self._executor is not None:
            launch.future = self._executor.submit(self._run, launch, inputs, shape)
            self._latest = launch
            return
        try:
            launch.future.set_result(self._run(launch, inputs, shape))
        except BaseException as error:
            launch.future.set_exception(error)

    def _rows(self, scheduled: SchedulerOutput) -> list[StepRow]:
        """The tokens that each request computes."""
        rows = []
        vocab_size = self._model.config.vocab_size
        for req_id, num_tokens in scheduled.num_scheduled_tokens.items():
            state = self._requests[req_id]
            drafts = scheduled.scheduled_spec_decode_tokens.get(req_id, [])
            prior = state.num_computed_tokens
            num_known = num_tokens - len(drafts)
            end = prior + num_known
            tokens = state.token_ids[prior:end]
            awaits_token = end == len(state.token_ids) + 1
            if awaits_token:
                tokens.append(0)
            # -1 stands for a draft that was never made; no token outside the vocabulary is sampled.
            tokens += takewhile(lambda token: 0 <= token < vocab_size, drafts)
            samples = end >= len(state.token_ids)
            rows.append(
                StepRow(
                    tokens, prior, state.block_ids, req_id, state, num_known, samples, awaits_token
                )
            )
        return rows

    def _check_rows(self, rows: Sequence[StepRow]) -> None:
        vocab_size, num_blocks = self._model.config.vocab_size, len(self.cache.keys[0])
        reasons = {}
        for row in rows:
            known = row.token_ids[: row.num_known]
            bad_tokens = [token for token in known if not 0 <= token < vocab_size]
            bad_blocks = [block for block in row.block_ids if not 0 < block < num_blocks]
            if bad_tokens:
                why = f"token id {bad_tokens[0]}: must be within 0..{vocab_size - 1}"
            elif bad_blocks:
                why = f"block id {bad_blocks[0]}: must be within 1..{num_blocks - 1}"
            elif len(known) < row.num_known or (row.awaits_token and self._latest is None):
                num_tokens = len(row.state.token_ids)
                end = row.prior_tokens + row.num_known
                why = f"{end} tokens are scheduled, {num_tokens} are known"
            else:
                continue
            reasons[row.req_id] = why
        if reasons:
            raise RowError(reasons)

    def _inputs(self, rows: Sequence[Row], shape: GraphShape) -> PrefillInputs | DecodeInputs:
        bucket, width, block_size = shape.bucket, shape.num_blocks, self.cache.block_size
        if shape.kind != "decode":
            return prefill_inputs(rows[0], bucket=bucket, width=width, block_size=block_size)
        return decode_inputs(
            rows,
            bucket=bucket,
            num_queries=shape.num_queries,
            width=width,
            block_size=block_size,
        )

    def _run(
        self, launch: Launch, inputs: PrefillInputs | DecodeInputs, shape: GraphShape
    ) -> StepResult:
        """Compute a step and sample; with an executor this runs on its thread."""
        output = ModelRunnerOutput(launch.req_ids, [])
        result = StepResult(output, shape, started=perf_counter())
        if launch.before is not None:
            previous, launch.before = launch.before.future.result(), None
            if any(row.awaits_token for row in launch.rows):
                tokens = [tokens[-1] for tokens in previous.output.sampled_token_ids]
                inputs.input_ids[: len(tokens)] = tokens
        attend = self.cache.attention(inputs, self._kv_segment_size)
        hidden = self._model.forward(inputs.input_ids, inputs.positions, attend)
        reasons = {}
        stride = inputs.num_queries if isinstance(inputs, DecodeInputs) else 0
        for index, row in enumerate(launch.rows):
            computed = hidden[index * stride : index * stride + len(row.token_ids)]
            result.num_tokens += len(row.token_ids)
            result.num_prior_tokens += row.prior_tokens
            # Earlier chunks have nothing to sample: the next token is known.
            sampled = self._model.logits(computed[row.num_known - 1 :]) if row.samples else None
            # Of an earlier chunk the hidden states are all that tells of its K and V.
            values = [computed] if sampled is None else [computed, sampled]
            if not all(np.isfinite(each).all() for each in values):
                reasons[row.req_id] = "its hidden states or logits are not finite"
            tokens = [] if sampled is None else verify(sampled, row.token_ids[row.num_known :])
            result.output.sampled_token_ids.append(tokens)
            if sampled is not None:
                result.logits[row.req_id] = sampled[: len(tokens)]
        if reasons:
            raise RowError(reasons)
        result.ended = perf_counter()
        return result


def _follows(rows: Sequence[StepRow], before: Launch) -> bool:
    """Whether a step can start while `before` runs.

    It can when it needs no token of that step, or when both sample for the same requests.
    """
    if not any(row.awaits_token for row in rows):
        return True
    return len(rows) == len(before.rows) and all(
        row.awaits_token and row.num_known == 1 and row.state is other.state and other.samples
        for row, other in zip(rows, before.rows, strict=True)
    )


def verify(logits: Float32Array, drafts: Sequence[int]) -> list[int]:
    """Greedy tokens behind a known token and its drafts, `logits` [1 + drafts, vocab].

    Drafts are kept as long as each is the most likely token (the smallest id on a tie); then comes
    the most likely one after them.
    """
    best = [int(row.argmax()) for row in logits]
    num_accepted = 0
    while num_accepted < len(drafts) and drafts[num_accepted] == best[num_accepted]:
        num_accepted += 1
    return best[: num_accepted + 1]
