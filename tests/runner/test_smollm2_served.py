"""The real model served by the command: pinned ids from the kernels, however they are batched."""

from typing import Any

import pytest

from segattn.runner import engine_options
from segattn.runner.checkpoint import Checkpoint
from segattn.tests.command import segattn
from segattn.tests.runner.pinned import CAPITAL, CHAT, CHAT_NUM_PROMPT_TOKENS, FIBONACCI


@pytest.fixture(autouse=True)
def loaded_once(smollm2_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares each command the seconds that reading the file takes."""
    monkeypatch.setattr(engine_options, "load_checkpoint", lambda path: smollm2_checkpoint)


def served(*arguments: object) -> Any:
    """Report of a command that must succeed."""
    result = segattn("generate", *arguments, "--json")
    assert result.status == 0, result.err
    return result.json


def test_one_shot_prefill_in_a_batch_of_two_agrees_with_the_plain_pass_too() -> None:
    report = served(CAPITAL.prompt, FIBONACCI.prompt, "--max-tokens", 12, "--check")
    assert [r["token_ids"] for r in report["requests"]] == [CAPITAL.token_ids, FIBONACCI.token_ids]
    assert report["backend"] == "interpreter"
    check = report["check"]
    assert (check["num_tokens"], check["tokens_agree"]) == (24, True)
    # Far apart: rounding cannot turn a greedy choice.
    assert 100 * check["max_logit_difference"] < check["min_top2_margin"]


def test_a_chat_answer_ends_its_turn_and_a_prefix_cache_hit_gives_the_same() -> None:
    report = served(CHAT.prompt, CHAT.prompt, "--chat")
    for request, num_cached in zip(report["requests"], (0, 32), strict=True):
        assert len(request["prompt_token_ids"]) == CHAT_NUM_PROMPT_TOKENS
        assert request["token_ids"] == CHAT.token_ids
        assert request["text"] == "The capital of France is Paris."
        assert request["finish_reason"] == "stop"
        assert request["num_cached_tokens"] == num_cached


@pytest.mark.parametrize(
    "settings",
    [
        ("--max-num-batched-tokens", 2, "--num-batched-tokens-buckets", "1,2", "--max-num-seqs", 2),
        ("--max-num-batched-tokens", 5, "--max-num-seqs", 1, "--no-prefix-caching"),
        ("--max-num-batched-tokens", 60, "--block-size", 32, "--num-seqs-buckets", "3,4"),
    ],
    ids=["chunks of 2", "one at a time in chunks of 5", "padded batch in blocks of 32"],
)
def test_chunks_buckets_blocks_and_batches_change_no_token(settings: tuple[object, ...]) -> None:
    prompts = (FIBONACCI.prompt, CAPITAL.prompt)
    report = served(*prompts, "--max-tokens", 3, "--max-model-len", 64, *settings)
    assert [r["token_ids"] for r in report["requests"]] == [
        FIBONACCI.token_ids[:3],
        CAPITAL.token_ids[:3],
    ]
