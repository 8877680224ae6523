"""The engine loop: requests in, scheduled steps through the model, completions out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from ..kernels.validation import BLOCK_SIZES, HEAD_DIMS, check_choice
from ..scheduler import (
    EngineCoreOutput,
    NeuronPolicy,
    NeuronScheduler,
    Request,
    RequestError,
    SchedulerConfig,
)
from ..scheduler.output import FinishReason
from ..scheduler.policy import check_schedulable
from .compile_plan import CompilePlan
from .llama import Float32Array, Llama
from .model_runner import ModelRunner, StepResult
from .paged_cache import PagedKVCache
from .step import Step


@dataclass
class Completion:
    """What a request has produced so far."""

    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    """None while the request runs."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    logits: list[Float32Array] = field(default_factory=list)
    """Logits [vocab] behind each token, when the engine keeps them."""


class Engine:
    """Serves requests on one model with the Neuron scheduler.

    `segattn.kernels` does every attention of every layer. With float32 weights the greedy tokens
    of a request do not depend on what else is served, on buckets, chunks or cache hits.
    """

    def __init__(
        self,
        model: Llama,
        config: SchedulerConfig,
        *,
        policy: NeuronPolicy | None = None,
        decode_context_length_buckets: Sequence[int] = (),
        kv_segment_size: int = 512,
        keep_logits: bool = False,
    ) -> None:
        """Allocate the cache and derive the compile plan.

        ValueError for a max_model_len beyond the model's positions, a block size or head size that
        the kernels do not take, a cache beyond memory, and bad context-length buckets.
        """
        check_choice("block_size", config.block_size, BLOCK_SIZES)
        check_choice("the model's head_dim", model.config.head_dim, HEAD_DIMS)
        largest = model.config.max_position_embeddings
        if config.max_model_len > largest:
            raise ValueError(
                f"max_model_len={config.max_model_len}: must be at most {largest}, "
                "the number of positions of the model"
            )
        # First, because it is what a size beyond memory fails on at once.
        cache = PagedKVCache(model.config, config.num_blocks, config.block_size, model.dtype)
        self.config = config
        self.scheduler = NeuronScheduler(config, policy or NeuronPolicy())
        self.plan = CompilePlan(
            config,
            max_decode_seqs=self._most_concurrent(),
            decode_context_length_buckets=decode_context_length_buckets,
        )
        self.runner = ModelRunner(model, self.plan, cache, kv_segment_size=kv_segment_size)
        self.completions: dict[str, Completion] = {}
        """Every request ever taken, by id."""
        self._vocab_size = model.config.vocab_size
        self._keep_logits = keep_logits
        self._num_steps = 0
        self._made_at = perf_counter()

    def add_request(self, request: Request) -> None:
        """Queue a request. RequestError, with nothing changed, for one that can never be served.

        Refused here: an id used before, an empty prompt, a token outside the vocabulary, a prompt
        of max_model_len or longer, a need of more blocks than the cache has, max_tokens < 1.
        """
        if request.request_id in self.completions:
            raise RequestError(request.request_id, "this id is already in use: ids must be unique")
        bad = [token for token in request.prompt_token_ids if not 0 <= token < self._vocab_size]
        if bad:
            raise RequestError(
                request.request_id,
                f"prompt token id {bad[0]}: must be within 0..{self._vocab_size - 1}",
            )
        check_schedulable(request, self.config, asynchronous=False)
        self.scheduler.add_request(request)
        self.completions[request.request_id] = Completion(list(request.prompt_token_ids))

    def has_requests(self) -> bool:
        """Whether a further step has something to do."""
        return bool(self.scheduler.has_requests())

    def step(self) -> Step | None:
        """Schedule and execute one step. None when it only cleared finished requests away.

        RuntimeError when unfinished requests exist and nothing was scheduled.
        """
        start = perf_counter()
        scheduled = self.scheduler.schedule()
        # Of this step: the update may leave nothing to do, and blocks free.
        state = self.scheduler.state.name
        num_free_blocks = self.scheduler.num_free_blocks
        result = self.runner.execute_model(scheduled)
        for output in self.scheduler.update_from_output(scheduled, result.output):
            self._record(output, result)
        if result.shape is None:
            if self.scheduler.get_num_unfinished_requests():
                raise RuntimeError("no progress: requests are unfinished and none was scheduled")
            return None
        for new in scheduled.scheduled_new_reqs:
            self.completions[new.req_id].num_cached_tokens = new.num_computed_tokens
        step = Step(
            index=self._num_steps,
            state=state,
            graph=result.shape.name,
            request_ids=tuple(scheduled.num_scheduled_tokens),
            num_tokens=scheduled.total_num_scheduled_tokens,
            num_tokens_padded=result.shape.bucket,
            num_prior_tokens=result.num_prior_tokens,
            num_new_tokens=len(result.logits),
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            kv_cache_usage=1 - num_free_blocks / self.scheduler.num_usable_blocks,
            start_seconds=start - self._made_at,
            duration_seconds=perf_counter() - start,
        )
        self._num_steps += 1
        return step

    def run(self) -> Iterator[Step]:
        """Step until every request is finished, yielding each executed step."""
        while self.has_requests():
            step = self.step()
            if step is not None:
                yield step

    def _most_concurrent(self) -> int:
        """Most requests that the scheduler lets live in the cache at once."""
        if self.scheduler.neuron_policy.kv_admission == "worst_case":
            return self.scheduler.max_kv_concurrent
        return self.scheduler.num_usable_blocks

    def _record(self, output: EngineCoreOutput, result: StepResult) -> None:
        completion = self.completions[output.request_id]
        completion.token_ids += output.new_token_ids
        completion.finish_reason = output.finish_reason
        if self._keep_logits and output.new_token_ids:
            completion.logits.append(result.logits[output.request_id])
