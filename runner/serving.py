"""Serve a list of prompts through an engine and gather what happened."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..reference.terminal import ShowProgress
from ..scheduler import Request, RequestError
from .engine import Engine
from .llama import Llama
from .plain_forward import NOTHING_COMPARED, Comparison, compare_with_plain
from .step import Step
from .tokenizer import Tokenizer


@dataclass
class PromptResult:
    """What became of one prompt: a continuation, or the error that refused or ended it."""

    request_id: str
    prompt: str
    prompt_token_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    """The generated text alone, without special tokens."""
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    error: str | None = None


def submit(
    engine: Engine, tokenizer: Tokenizer, prompts: Sequence[str], max_tokens: int, *, chat: bool
) -> list[PromptResult]:
    """Queue every prompt under its number as id; a refused one keeps its error and is left out."""
    encode = tokenizer.encode_chat if chat else tokenizer.encode
    results = []
    for number, prompt in enumerate(prompts):
        result = PromptResult(str(number), prompt)
        results.append(result)
        try:
            if not _is_text(prompt):
                raise RequestError(result.request_id, "the prompt is not valid Unicode text")
            result.prompt_token_ids = encode(prompt) if prompt else []
            engine.add_request(
                make_request(tokenizer, result.request_id, result.prompt_token_ids, max_tokens)
            )
        except RequestError as error:
            result.error = str(error)
    return results


def make_request(
    tokenizer: Tokenizer, request_id: str, token_ids: list[int], max_tokens: int
) -> Request:
    """A request that ends at the model's stop tokens."""
    eos, *others = tokenizer.stop_token_ids
    return Request(
        request_id, token_ids, max_tokens, eos_token_id=eos, stop_token_ids=tuple(others)
    )


def _is_text(prompt: str) -> bool:
    """Whether the prompt can be encoded; arguments of a command may hold arbitrary bytes."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        return False
    return True


def serve(
    engine: Engine, tokenizer: Tokenizer, results: Sequence[PromptResult], progress: ShowProgress
) -> list[Step]:
    """Run the engine until all queued prompts are done; fills `results`, returns the steps."""
    accepted = [result for result in results if result.error is None]
    steps: list[Step] = []
    if not accepted:
        return steps
    with progress("warming up graphs", len(engine.plan.shapes)) as advance:
        for _ in engine.runner.warm_up():
            advance(1)
    most_tokens = sum(
        min(request.max_tokens, engine.scheduler.max_model_len - request.num_prompt_tokens)
        for request in engine.scheduler.requests.values()
    )
    with progress("generating tokens", most_tokens) as advance:
        for step in engine.run():
            steps.append(step)
            advance(step.num_new_tokens)
    for result in accepted:
        completion = engine.completions[result.request_id]
        result.token_ids = completion.token_ids
        result.text = tokenizer.decode(completion.token_ids)
        result.finish_reason = completion.finish_reason
        result.num_cached_tokens = completion.num_cached_tokens
        result.error = completion.error
    return steps


def check(
    model: Llama, engine: Engine, results: Sequence[PromptResult], progress: ShowProgress
) -> Comparison:
    """Compare every served token with the plain forward pass of `model`."""
    accepted = [result for result in results if result.error is None]
    comparison = NOTHING_COMPARED
    with progress("checking requests", len(accepted)) as advance:
        for result in accepted:
            comparison |= compare_with_plain(
                model,
                result.prompt_token_ids,
                result.token_ids,
                engine.completions[result.request_id].logits,
            )
            advance(1)
    return comparison
