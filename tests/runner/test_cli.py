"""The command itself: its table of sub-commands, help, `env` and wrong usage."""

import importlib
import os
import subprocess
import sys

import pytest

from segattn import __version__
from segattn.runner.cli import COMMANDS
from segattn.tests.runner.command import segattn


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_of_the_table_exists_and_has_help(name: str) -> None:
    module, _, function = COMMANDS[name].target.partition(":")
    assert callable(getattr(importlib.import_module(f"segattn.{module}"), function))
    result = segattn(name, "--help")
    assert result.status == 0
    assert name in result.out.lower()


def test_help_lists_every_command() -> None:
    result = segattn("--help")
    assert result.status == 0
    for name in COMMANDS:
        assert name in result.out


def test_an_unknown_command_is_an_error_with_the_known_ones() -> None:
    result = segattn("generrate")
    assert result.status == 2
    assert result.err.startswith("error: no command 'generrate': must be one of generate, ")


def test_no_command_prints_the_list_and_fails() -> None:
    result = segattn()
    assert (result.status, result.out) == (2, segattn("--help").out)


def test_version() -> None:
    assert segattn("--version").out == f"segattn {__version__}\n"


def test_generate_without_prompt_is_a_usage_error() -> None:
    assert segattn("generate").status == 2


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    for module in ("typer_command", "generate"):
        monkeypatch.delitem(sys.modules, f"segattn.runner.{module}", raising=False)
    result = segattn("generate", "the")
    assert result.status == 2
    assert result.err == "error: 'typer' is not installed: pip install 'segattn[cli]' brings it\n"


def test_env_prints_versions_backend_and_model() -> None:
    result = segattn("env")
    assert result.status == 0
    facts = dict(line.split(": ", 1) for line in result.out.splitlines())
    assert facts["segattn"].startswith(__version__)
    assert facts["kernel backend"] == "interpreter"
    assert facts["default model"].endswith("SmolLM2-135M-Instruct.Q4_1.gguf")
    assert "numpy " in facts["libraries (core)"]
    assert "nki absent" in facts["libraries (AWS SDK)"]


def test_ctrl_c_ends_a_command_without_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(argv: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("segattn.runner.env.main", interrupted)
    result = segattn("env")
    assert (result.status, result.err) == (130, "interrupted\n")


def test_a_reader_that_leaves_early_gives_no_traceback() -> None:
    command = [sys.executable, "-c", "from segattn.runner.cli import main; main()", "env"]
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        result = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(write_end)
    assert (result.returncode, result.stderr) == (1, "")


def test_output_that_cannot_be_written_is_one_error_line() -> None:
    program = """
import sys
from segattn.runner import cli, env
def full(argv):
    raise OSError(28, "No space left on device")
env.main, sys.argv = full, ["segattn", "env"]
cli.main()
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (2, "error: [Errno 28] No space left on device\n")
