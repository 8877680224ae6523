"""Continue prompts with a real model, the Neuron scheduler and the kernels.

All prompts are served at once; printed are the texts and a table of steps.
"""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from ..kernels.backend import BACKEND
from ..reference.outputs import OutputFile
from ..reference.terminal import one_line, phase
from .engine_options import add_engine_options, make_engine
from .llama import Llama
from .report import GenerationReport, print_json, print_text, to_json
from .serving import check as check_served
from .serving import serve, submit


def add_arguments(parser: ArgumentParser) -> None:
    """Prompts, the engine's options, what to do beside."""
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="texts to continue")
    add_engine_options(parser)
    parser.add_argument(
        "--chat", action="store_true", help="put each prompt into the model's chat template"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare with a float32 forward pass in plain NumPy, without cache",
    )
    parser.add_argument("--out", type=Path, help="write the JSON report to this file")
    parser.add_argument("--wide", action="store_true", help="all columns of the table")


def run(options: Namespace) -> int:
    """Serve the prompts; 1 when one failed, or when --check found other float32 tokens."""
    out = OutputFile(options.out) if options.out else None
    engine, checkpoint = make_engine(options, keep_logits=options.check)
    tokenizer = checkpoint.tokenizer
    results = submit(engine, tokenizer, options.prompts, options.max_tokens, chat=options.chat)
    refused = [result.request_id for result in results if result.error is not None]
    steps = serve(engine, tokenizer, results, phase)
    failures = [result for result in results if result.error is not None]
    for result in failures:
        what = "" if result.request_id in refused else f"request {result.request_id!r} ended: "
        print(f"error: {what}{one_line(str(result.error))}", file=sys.stderr, flush=True)
    comparison = None
    if options.check and steps:
        plain = Llama(checkpoint.config, checkpoint.weights, max_positions=options.max_model_len)
        comparison = check_served(plain, engine, results, phase)
    report = GenerationReport(
        str(options.model),
        options.dtype,
        BACKEND,
        engine.config,
        results,
        steps,
        engine.plan.shapes,
        comparison,
    )
    if out:
        out.save_json(to_json(report))
    if options.json:
        print_json(report)
    else:
        print_text(report, wide=options.wide)
    # Only float32 promises equal tokens.
    differs = comparison is not None and options.dtype == "float32" and not comparison.tokens_agree
    return int(bool(failures or differs))
