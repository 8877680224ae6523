"""The command itself: its tree, help and completion, and the wall around all commands."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from segattn import __version__
from segattn.cli import BENCH, COMMANDS, Command, Parser, leaves, make_parser
from segattn.runner import env
from segattn.tests.command import segattn

LEAVES = [
    *((name,) for name, entry in COMMANDS.items() if isinstance(entry, Command)),
    *(("bench", name) for name in BENCH),
]
PROGRAM = [sys.executable, "-m", "segattn"]


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_every_command_has_help_with_an_example_and_its_statuses(path: tuple[str, ...]) -> None:
    result = segattn(*path, "--help")
    assert (result.status, result.err) == (0, "")
    for part in ("--json", "example:", f"segattn {' '.join(path)} ", "exit status: 0 all done"):
        assert part in result.out


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_the_example_of_the_help_parses(path: tuple[str, ...]) -> None:
    entry = BENCH[path[1]] if len(path) == 2 else COMMANDS[path[0]]
    assert isinstance(entry, Command)
    example = entry.example.replace('"', "").split() if '"' not in entry.example else ["text"]
    make_parser().parse_args([*path, *example])


def test_help_lists_every_command() -> None:
    result = segattn("--help")
    assert result.status == 0
    for name in COMMANDS:
        assert name in result.out
    assert all(name in segattn("bench", "--help").out for name in BENCH)


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes_commands_and_their_options(shell: str) -> None:
    script = segattn("completion", shell).out
    for word in ("footprint", "--max-num-seqs", "--samples", "--minutes"):
        assert word in script


def test_all_arguments_can_be_filled_in_at_once() -> None:
    root = make_parser()
    for parser in leaves(root):
        parser.fill()
    assert sum(hasattr(parser, "run") for parser in leaves(root)) == len(LEAVES)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "COMMAND"),
        (("generrate",), "'generrate' (choose from"),
        (("bench", "speed"), "'speed' (choose from"),
        (("generate",), "PROMPT"),
        (("generate", "the", "--dtype", "fp4"), "'fp4' (choose from"),
        (("generate", "the", "--num-seqs-buckets", "1,x"), "integers separated by commas"),
        (("generate", "the", "--frobnicate"), "--frobnicate"),
        (("lint", "absent.py"), "absent.py does not exist"),
        (("replay", "absent.jsonl.gz", "--wide"), "--wide"),
        (("policies", "--rate", "nan"), "--rate"),
        (("policies", "--workload", "/dev/null/x"), "/dev/null/x"),
        (("timeline", "a.json", "--html", "/absent/page.html"), "'/absent/page.html'"),
        (("timeline", "a.json", "--html", "/tmp"), "'/tmp': is a folder"),
        (("bench", "plots", "absent.json"), "absent.json is missing"),
        (("bench", "kernels", "--out", "/absent/k.json"), "'/absent/k.json'"),
        (("fuzz", "--out", "/absent/f.gz"), "'/absent/f.gz'"),
        (("trace", "absent.py"), "'absent.py' is not a file"),
        (("trace", "-m", "absent"), "'absent' does not exist"),
        (("trace", "-m", "absent.inner"), "'absent' does not exist"),
        (("lint", "/dev/zero"), "must be at most"),
        (("generate", "the", "--model", "/absent"), "'/absent' does not exist"),
        (("generate", "the", "--block-size", "0"), "block_size=0"),
    ],
)
def test_whatever_is_wrong_is_one_line_and_status_2(
    arguments: tuple[str, ...], named: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    result = segattn(*arguments)
    errors = [line for line in result.err.splitlines() if not line.startswith("reading ")]
    assert (result.status, result.out, len(errors)) == (2, "", 1), result
    assert errors[0].startswith("error: ")
    assert named in errors[0]


def test_version() -> None:
    assert segattn("--version").out == f"segattn {__version__}\n"


def test_env_prints_versions_backend_and_model() -> None:
    result = segattn("env")
    assert result.status == 0
    facts = dict(line.split(": ", 1) for line in result.out.splitlines())
    assert facts["segattn"].startswith(__version__)
    assert facts["kernel backend"] == "interpreter"
    assert facts["default model"].endswith("SmolLM2-135M-Instruct.Q4_1.gguf")
    assert "numpy " in facts["libraries (core)"]
    assert "nki absent" in facts["libraries (AWS SDK)"]
    assert segattn("env", "--json").json == facts


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Let `segattn env` fail."""

    def run(options: object) -> int:
        raise error

    monkeypatch.setattr(env, "run", run)


def test_ctrl_c_ends_a_command_without_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    raising(monkeypatch, KeyboardInterrupt())
    result = segattn("env")
    assert (result.status, result.err) == (130, "interrupted\n")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            OSError(28, "No space left on device"),
            "error: standard output: [Errno 28] No space left on device\n",
        ),
        (ValueError("two\nlines \x1b[31m"), "error: two lines \\x1b[31m\n"),
        (RecursionError("deep"), "error: RecursionError: deep (--debug shows the traceback)\n"),
        (MemoryError(), "error: out of memory\n"),
        (MemoryError("9 GiB"), "error: out of memory: 9 GiB\n"),
    ],
)
def test_no_exception_leaves_as_a_traceback(
    error: BaseException, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raising(monkeypatch, error)
    result = segattn("env")
    assert (result.status, result.err) == (2, line)


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    raising(monkeypatch, ZeroDivisionError("here"))
    with pytest.raises(ZeroDivisionError, match="here"):
        segattn("env", "--debug")


@pytest.mark.parametrize("arguments", [("env",), ("--help",), ("bench", "kernels", "--help")])
def test_a_reader_that_leaves_early_gives_no_traceback(arguments: tuple[str, ...]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        result = subprocess.run(
            [*PROGRAM, *arguments], stdout=write_end, stderr=subprocess.PIPE, text=True
        )
    finally:
        os.close(write_end)
    assert (result.returncode, result.stderr) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [("env",), ("--help",)])
def test_a_full_disk_is_one_line(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [*PROGRAM, *arguments], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert result.returncode == 2
    assert result.stderr == "error: standard output: [Errno 28] No space left on device\n"


@contextmanager
def exploring() -> Iterator[subprocess.Popen[str]]:
    """A long command with two children, in a process group of its own."""
    command = [*PROGRAM, "explore", "--requests", "3", "--jobs", "2"]
    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell starts what runs in the background with interrupts ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as running:
        assert running.stderr is not None
        assert running.stderr.readline() == f"configurations: 0/{_num_worlds()}\n"
        yield running


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_a_command_and_its_children(number: int, status: int) -> None:
    with exploring() as running:
        running.send_signal(number)
        assert running.stderr is not None
        assert "Traceback" not in running.stderr.read()
    assert running.returncode == status
    wait_until_no_process_of(running.pid)


def test_children_end_with_a_parent_that_was_killed() -> None:
    with exploring() as running:
        running.kill()
    wait_until_no_process_of(running.pid)


def _num_worlds() -> int:
    from segattn.scheduler.testing.explore_command import POLICIES, Size, worlds

    return len(list(worlds(Size(3, 3, 3), POLICIES["default"])))


def wait_until_no_process_of(group: int) -> None:
    """Wait until a process group is empty."""
    while True:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)


def test_the_parser_has_no_option_twice() -> None:
    for parser in leaves(make_parser()):
        assert isinstance(parser, Parser)
        parser.fill()


def test_benchmarks_run_blas_on_one_thread_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, expected in ((None, "1"), ("3", "3")):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if given is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", given)
        make_parser().parse_args(["bench", "kernels"])
        assert os.environ["OMP_NUM_THREADS"] == expected
