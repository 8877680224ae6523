"""`segattn chat` on the random model: a conversation, its commands, and what goes wrong."""

import json
from pathlib import Path

import numpy as np
import pytest

from segattn.reference.terminal import printable
from segattn.runner.llama import Llama
from segattn.runner.loading import load_checkpoint
from segattn.tests.command import Result, segattn
from segattn.tests.runner.model_files import EOS_TOKEN_ID, write_gguf
from segattn.tests.runner.random_model import random_weights
from segattn.tests.runner.runner_steps import greedy_tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random model as a GGUF file."""
    return write_gguf(tmp_path_factory.mktemp("model") / "random.gguf", random_weights())


def chat(model: Path, typed: str, *arguments: object) -> Result:
    """Answer what is typed, with three tokens each, unless `arguments` say otherwise."""
    limits = ("--max-model-len", 128, "--max-num-batched-tokens", 128, "--max-tokens", 3)
    return segattn("chat", "--model", model, *limits, *arguments, typed=typed)


def answers(model: Path, *messages: str, system: str = "") -> list[str]:
    """What the plain forward pass answers to each message of one conversation."""
    checkpoint = load_checkpoint(model)
    llama = Llama(checkpoint.config, checkpoint.weights)
    said = [{"role": "system", "content": system}] if system else []
    found = []
    for message in messages:
        said.append({"role": "user", "content": message})
        tokens = greedy_tokens(llama, checkpoint.tokenizer.encode_messages(said), 3)
        end = tokens.index(EOS_TOKEN_ID) + 1 if EOS_TOKEN_ID in tokens else 3
        found.append(checkpoint.tokenizer.decode(tokens[:end]))
        said.append({"role": "assistant", "content": found[-1]})
    return found


def printed(result: Result) -> list[str]:
    """The answers of a run with --json."""
    return [json.loads(line)[1]["content"] for line in result.out.splitlines()]


def test_a_conversation_is_answered_message_by_message(model: Path) -> None:
    result = chat(model, "the first\n\nand 12\n", "--json")
    assert result.status == 0
    assert printed(result) == answers(model, "the first", "and 12")
    (answer,) = answers(model, "the first")
    assert chat(model, "the first\n").out == printable(answer) + "\n"


def test_reset_forgets_and_exit_leaves(model: Path) -> None:
    result = chat(model, "the first\n/reset\nand 12\n/exit\nnever\n", "--json")
    assert printed(result) == [answers(model, "the first")[0], answers(model, "and 12")[0]]


def test_a_system_message_starts_every_conversation(model: Path) -> None:
    result = chat(model, "the first\n/reset\nthe first\n", "--json", "--system", "and 12")
    assert printed(result) == answers(model, "the first", system="and 12") * 2


def test_a_message_that_is_too_long_is_refused_and_the_next_one_answered(model: Path) -> None:
    result = chat(model, "the " * 200 + "\nthe first\n", "--json")
    assert result.status == 1
    assert printed(result) == answers(model, "the first")
    (line,) = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert "must be shorter than max_model_len=128 (/reset starts a new conversation)" in line


def test_an_answer_that_fails_says_why(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_a_number(self: Llama, hidden: np.ndarray) -> np.ndarray:
        return np.full((len(hidden), self.config.vocab_size), np.nan, np.float32)

    monkeypatch.setattr(Llama, "logits", not_a_number)
    result = chat(model, "the first\n")
    assert (result.status, result.out) == (1, "")
    (line,) = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert "not finite" in line
