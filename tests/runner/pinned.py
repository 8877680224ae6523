"""Greedy continuations of SmolLM2-135M-Instruct in float32, recorded from other implementations."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Pinned:
    """A prompt and the ids that follow it."""

    prompt: str
    token_ids: list[int]


CAPITAL = Pinned(
    "The capital of France is",
    [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33],
)
FIBONACCI = Pinned(
    "def fibonacci(n):",
    [472, 585, 304, 1758, 216, 32, 42, 448, 1003, 216, 33, 472],
)
CHAT = Pinned(
    "What is the capital of France?",
    [504, 3575, 282, 4649, 314, 7042, 30, 2],
)
CHAT_NUM_PROMPT_TOKENS = 37
