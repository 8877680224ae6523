"""The command `segattn`: a table of sub-commands, each imported only when it is called.

A sub-command is a function `main(argv) -> exit status`. 0: all done; 1: part of the work failed
and the rest was done, or nobody read the output to its end; 2: nothing was done, because of an
argument, a file or a missing library; 130: interrupted (Ctrl-C).
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from .. import __version__
from ..reference.extras import MissingExtraError

PARTLY_FAILED = 1
NOTHING_DONE = 2
INTERRUPTED = 130


@dataclass(frozen=True)
class Command:
    """A sub-command: its function, as `module:function` within the package, and one help line."""

    target: str
    help: str


COMMANDS = {
    "generate": Command(
        "runner.generate:main", "continue prompts with a real model, our scheduler and kernels"
    ),
    "timeline": Command(
        "runner.timeline:main", "turn a report of generate into a Perfetto trace or a page"
    ),
    "buckets": Command("runner.buckets:main", "plan bucket lists from reports of generate"),
    "env": Command("runner.env:main", "print what a bug report needs"),
    "lint": Command(
        "reference.nki.lint.command:main", "check NKI kernels for removed and misused API"
    ),
    "bench": Command("benchmarks.command:main", "benchmarks: kernels, microbenchmarks, ..."),
    "trace": Command(
        "benchmarks.trace_command:main", "run a script and model every NKI kernel that it launches"
    ),
    "fuzz": Command(
        "benchmarks.fuzz.command:main", "compare a scheduler with the NumPy model on random work"
    ),
    "explore": Command(
        "benchmarks.explore.command:main", "walk every reachable state of small Neuron schedulers"
    ),
    "replay": Command("scheduler.replay:main", "replay recorded traces of vLLM's scheduler"),
}


def main() -> None:
    """Run the sub-command named on the command line and exit with its status."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        sys.exit(0 if arguments else NOTHING_DONE)
    name, *rest = arguments
    if name == "--version":
        print(f"segattn {__version__}")
        sys.exit(0)
    if name not in COMMANDS:
        sys.exit(failure(f"no command {name!r}: must be one of {', '.join(COMMANDS)}"))
    try:
        status = load(COMMANDS[name])(rest)
        sys.stdout.flush()
    except MissingExtraError as error:
        status = failure(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        status = INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has left; what is still buffered must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = PARTLY_FAILED
    except OSError as error:
        # Commands report what they cannot read; what is left is output that cannot be written.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = failure(str(error))
    sys.exit(status)


def usage() -> str:
    """The list of sub-commands."""
    lines = [f"  {name:<10} {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        ["usage: segattn COMMAND ...   (segattn COMMAND --help tells more)", "", *lines]
    )


def failure(message: str) -> int:
    """Print one error line on stderr; returns the exit status for nothing done."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    return NOTHING_DONE


def load(command: Command) -> Callable[[Sequence[str]], int]:
    """The function of a command, imported now."""
    module, _, function = command.target.partition(":")
    loaded: Callable[[Sequence[str]], int] = getattr(
        import_module(f"...{module}", __name__), function
    )
    return loaded
