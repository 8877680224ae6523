"""The command `segattn`: one tree of sub-commands, and the wall around all of them.

A sub-command is a module with `add_arguments(parser)` and `run(options) -> exit status`, imported
when it is called. Whatever a command raises leaves here as one line on stderr.
"""

import argparse
import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NoReturn

from . import __version__
from .reference.extras import MissingExtraError
from .reference.terminal import one_line

PARTLY_FAILED, NOTHING_DONE, INTERRUPTED, TERMINATED = 1, 2, 130, 143


@dataclass(frozen=True)
class Command:
    """A sub-command: its module within the package, help, an example, what status 1 means."""

    module: str
    help: str
    example: str
    partly: str = "the reader of the output left before its end"


BENCH = {
    "run": Command(
        "benchmarks.run_command",
        "model or time any NKI kernel, of your own files too",
        "my_kernel.py::scale --shape x=128,512:bfloat16",
        "a kernel failed, or differs from its --check function",
    ),
    "kernels": Command(
        "benchmarks.kernels.command",
        "attention kernels: modelled, or measured with --backend device",
        "--only 2048 --out kernels.json",
        "a target was missed, or a measured row failed",
    ),
    "attention_cte": Command(
        "benchmarks.kernels.attention_cte",
        "AWS's public prefill kernel beside ours, both modelled",
        "--nki-library ../nki-library",
        "a row gains less than its limit",
    ),
    "footprint": Command(
        "benchmarks.kernels.footprint",
        "SBUF bytes and program length over supported shapes",
        "--samples 20 --kernel paged_decode",
        "a program needs more than there is",
    ),
    "interpreter": Command(
        "benchmarks.interpreter",
        "CPU time of the interpreter against plain NumPy",
        "--rounds 3",
        "a ratio is above its limit (with --check)",
    ),
    "microbenchmarks": Command(
        "benchmarks.microbenchmarks.command",
        "open constants of the cost model, on a device",
        "--backend device --out constants.json",
        "an experiment failed on the device",
    ),
    "plots": Command(
        "benchmarks.kernels.plots",
        "roofline, time against prior, engine timeline as pictures",
        "kernels.json --folder plots",
    ),
    "scheduler": Command(
        "benchmarks.scheduler.command",
        "time per request-step beside the real vLLM (needs vLLM)",
        "--kind base async --repetitions 3",
    ),
}

COMMANDS: dict[str, Command | dict[str, Command]] = {
    "generate": Command(
        "runner.generate",
        "continue prompts with a real model, our scheduler and kernels",
        '"The capital of France is" --max-tokens 16',
        "a prompt was refused, or --check found other tokens",
    ),
    "chat": Command(
        "runner.chat",
        "talk with a model; the answer streams as it is generated",
        "--max-tokens 64",
        "a message was refused",
    ),
    "env": Command("runner.env", "print what a bug report needs", "--json"),
    "timeline": Command(
        "runner.timeline",
        "turn a report of generate into a Perfetto trace or a page",
        "report.json --html timeline.html",
    ),
    "buckets": Command(
        "runner.buckets",
        "plan bucket lists from reports of generate",
        "report.json --max-buckets 3",
    ),
    "replay": Command(
        "scheduler.testing.replay",
        "replay recorded traces of vLLM's scheduler",
        "tests/data/traces/base.jsonl.gz",
        "a trace differs or cannot be replayed",
    ),
    "bench": BENCH,
    "fuzz": Command(
        "scheduler.testing.command",
        "compare a scheduler with the NumPy model on random work",
        "--kind neuron --minutes 0.5",
        "a run failed; its trace is written and printed",
    ),
    "explore": Command(
        "scheduler.testing.explore_command",
        "walk every reachable state of small Neuron schedulers",
        "--requests 1 --max-model-len 2",
        "a rule is broken; the shortest way to it is printed",
    ),
    "policies": Command(
        "benchmarks.scheduler.policies",
        "Neuron scheduling policies on a virtual clock, modelled times",
        "--requests 40 --rate 4",
    ),
    "lint": Command(
        "reference.nki.lint.command",
        "check NKI kernels against the language and its rules",
        "kernels/ --ignore deprecated-api",
        "errors",
    ),
    "trace": Command(
        "benchmarks.trace_command",
        "run a script and model every NKI kernel that it launches",
        "--stalls 5 examples/raw_kernel.py",
        "the script failed; the launches before are reported",
    ),
}


class UsageError(ValueError):
    """The command line is wrong."""


class Parser(argparse.ArgumentParser):
    """Takes its arguments from its command's module when they are first needed."""

    command: Command | None = None
    run: Callable[[argparse.Namespace], int]

    def fill(self) -> None:
        """Import the module of the command and add its arguments."""
        if self.command is None or hasattr(self, "run"):
            return
        if self.command.module.startswith("benchmarks."):
            # Before NumPy reads it: threads of BLAS gain nothing on a kernel's tiles.
            os.environ.setdefault("OMP_NUM_THREADS", "1")
        module = import_module(f".{self.command.module}", __package__)
        self.description = module.__doc__
        self.formatter_class = argparse.RawDescriptionHelpFormatter
        self.epilog = (
            f"example:\n  {self.prog} {self.command.example}\n\nexit status: 0 all done; "
            f"1 {self.command.partly};\n2 nothing done (argument, file or missing library); "
            "130 interrupted"
        )
        self.add_argument("--json", action="store_true", help="print JSON instead of text")
        self.add_argument("--debug", action="store_true", help="show tracebacks of errors")
        module.add_arguments(self)
        self.run = module.run
        self.set_defaults(run=self.run, parser=self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As the base class, with the arguments there."""
        self.fill()
        return super().parse_known_args(args, namespace)

    def format_help(self) -> str:
        """As the base class, with the arguments there."""
        self.fill()
        return super().format_help()

    def _print_message(self, message: str, file: Any = None) -> None:
        """As the base class, which would hide a full disk and a closed pipe."""
        (file or sys.stderr).write(message)

    def error(self, message: str) -> NoReturn:
        """UsageError: the usage would only hide it."""
        raise UsageError(f"{message} (see {self.prog} --help)")


def make_parser() -> Parser:
    """The whole tree; arguments of sub-commands are still to be filled in."""
    root = Parser("segattn", description="LLM attention kernels and a scheduler for AWS Trainium2.")
    root.add_argument("--version", action="version", version=f"segattn {__version__}")
    branches = root.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, entry in COMMANDS.items():
        if isinstance(entry, Command):
            branches.add_parser(name, help=entry.help).command = entry
            continue
        help_ = f"measurements: {', '.join(entry)}"
        group = branches.add_parser(name, help=help_, description=help_)
        leaves = group.add_subparsers(title="benchmarks", metavar="NAME", required=True)
        for leaf, command in entry.items():
            leaves.add_parser(leaf, help=command.help).command = command
    completion = branches.add_parser("completion", help="print a completion script for a shell")
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    completion.set_defaults(run=lambda options: print_completion(root, options.shell))
    return root


def leaves(parser: Parser) -> Iterator[Parser]:
    """Every parser below one, itself included."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from leaves(child)


def print_completion(root: Parser, shell: str) -> int:
    """Print what makes a shell complete commands and options (extra `cli`)."""
    try:
        import shtab
    except ModuleNotFoundError as error:
        raise MissingExtraError("shtab", "cli") from error
    for parser in leaves(root):
        with contextlib.suppress(MissingExtraError):
            parser.fill()
    print(shtab.complete(root, shell))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sub-command that the arguments name; the exit status.

    With --debug an error leaves as it is, with its traceback.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        # So that files are closed and children end as they do for Ctrl-C.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    try:
        try:
            options = make_parser().parse_args(arguments)
            status: int = options.run(options)
        finally:
            sys.stdout.flush()
    except SystemExit as left:  # --help, --version, and what a traced script wants
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    except KeyboardInterrupt:
        _silence_stdout()
        say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        _silence_stdout()
        return PARTLY_FAILED
    except Exception as error:
        if "--debug" in arguments:
            raise
        _silence_stdout()
        say(f"error: {_told(error)}")
        return NOTHING_DONE
    return status


def _told(error: Exception) -> str:
    """What the line of an error says."""
    if isinstance(error, MemoryError):
        return f"out of memory: {error}".removesuffix(": ")
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and not error.filename:
        return f"standard output: {error}"
    if isinstance(error, (ValueError, OSError, MissingExtraError)):
        return str(error)
    return f"{type(error).__name__}: {error} (--debug shows the traceback)"


def say(message: str) -> None:
    """Print one line on stderr, if anybody is there to read it."""
    with contextlib.suppress(OSError, ValueError):
        print(one_line(message), file=sys.stderr, flush=True)


def _silence_stdout() -> None:
    """What is still buffered must not fail again at exit."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        return
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
