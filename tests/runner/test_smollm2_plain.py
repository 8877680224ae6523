"""The real model in plain NumPy: tokenizer, chat template and weights give the pinned ids."""

import pytest

from segattn.runner.checkpoint import Checkpoint
from segattn.runner.llama import Llama
from segattn.runner.plain_forward import plain_logits
from segattn.tests.runner.pinned import CAPITAL, CHAT, CHAT_NUM_PROMPT_TOKENS, FIBONACCI, Pinned


def greedy_choices(model: Llama, prompt: list[int], output: list[int]) -> list[int]:
    """What the model would choose at each place of `output`, having read what stands before."""
    logits = plain_logits(model, prompt + output[:-1], first=len(prompt) - 1)
    return [int(token) for token in logits.argmax(axis=-1)]


@pytest.mark.parametrize("pinned", [CAPITAL, FIBONACCI], ids=["capital", "fibonacci"])
def test_raw_text_continues_with_the_pinned_ids(
    smollm2: Llama, smollm2_checkpoint: Checkpoint, pinned: Pinned
) -> None:
    prompt = smollm2_checkpoint.tokenizer.encode(pinned.prompt)
    assert greedy_choices(smollm2, prompt, pinned.token_ids) == pinned.token_ids


def test_a_question_in_the_chat_template_is_answered_with_the_pinned_ids(
    smollm2: Llama, smollm2_checkpoint: Checkpoint
) -> None:
    tokenizer = smollm2_checkpoint.tokenizer
    prompt = tokenizer.encode_chat(CHAT.prompt)
    assert len(prompt) == CHAT_NUM_PROMPT_TOKENS
    assert greedy_choices(smollm2, prompt, CHAT.token_ids) == CHAT.token_ids
    assert tokenizer.decode(CHAT.token_ids) == "The capital of France is Paris."
    assert CHAT.token_ids[-1] in tokenizer.stop_token_ids
