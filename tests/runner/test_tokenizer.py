"""Tokenisation against ids worked out from the vocabulary, and the chat template."""

import pytest

from segattn.runner import chat_template
from segattn.runner.chat_template import render_chat
from segattn.runner.tokenizer import Tokenizer, bpe_backend
from segattn.tests.runner.model_files import CHAT_TEMPLATE, MERGES, SPECIAL_TOKENS, vocabulary

IDS = {token: index for index, token in enumerate(vocabulary())}


def tokenizer(pre_tokenizer: str = "smollm", bos_token: str | None = None) -> Tokenizer:
    backend = bpe_backend(vocabulary(), MERGES, [0, 1, 2], pre_tokenizer, bos_token)
    return Tokenizer(backend, stop_token_ids=(2,), chat_template=CHAT_TEMPLATE)


def test_merges_apply_in_rank_order_and_a_space_is_part_of_the_word() -> None:
    assert tokenizer().encode("the the") == [IDS["the"], IDS["Ġthe"]]


def test_smollm_splits_digits_one_by_one() -> None:
    assert tokenizer("smollm").encode("12") == [IDS["1"], IDS["2"]]


@pytest.mark.parametrize("pre_tokenizer", ["gpt-2", "llama-bpe"])
def test_other_pre_tokenizers_keep_digits_together(pre_tokenizer: str) -> None:
    assert tokenizer(pre_tokenizer).encode("12") == [IDS["12"]]


def test_llama_bpe_takes_at_most_three_digits_at_a_time() -> None:
    assert tokenizer("llama-bpe").encode("00012") == [IDS["0"]] * 3 + [IDS["12"]]
    assert tokenizer("llama-bpe").encode("0012") == [IDS["0"]] * 2 + [IDS["1"], IDS["2"]]


def test_llama_bpe_takes_a_whole_piece_that_no_merge_builds() -> None:
    tokens = [*vocabulary(), "hello"]
    whole = bpe_backend(tokens, MERGES, [], "llama-bpe", bos_token=None)
    assert whole.encode("hello").ids == [len(tokens) - 1]
    merged = bpe_backend(tokens, MERGES, [], "gpt-2", bos_token=None)
    assert merged.encode("hello").ids == [IDS["he"], IDS["l"], IDS["l"], IDS["o"]]


def test_no_beginning_of_sequence_is_added_unless_the_model_wants_it() -> None:
    assert tokenizer().encode("h") == [IDS["h"]]
    assert tokenizer(bos_token="<|im_start|>").encode("h") == [1, IDS["h"]]


def test_an_empty_text_has_no_tokens() -> None:
    assert tokenizer().encode("") == []


def test_special_tokens_are_one_id_each_and_are_not_decoded() -> None:
    ids = tokenizer().encode("h<|im_end|>h")
    assert ids == [IDS["h"], SPECIAL_TOKENS.index("<|im_end|>"), IDS["h"]]
    assert tokenizer().decode(ids) == "hh"


def test_any_text_comes_back_from_its_ids() -> None:
    text = "  the 12 émigrés…\n\t日本"
    assert tokenizer().decode(tokenizer().encode(text)) == text


def test_the_chat_prompt_ends_where_the_assistant_answers() -> None:
    expected = "<|im_start|>user\nhe<|im_end|>\n<|im_start|>assistant\n"
    # A beginning-of-sequence id would come from the template alone.
    assert tokenizer(bos_token="<|endoftext|>").encode_chat("he") == tokenizer().encode(expected)


def test_a_model_without_template_refuses_chat() -> None:
    with pytest.raises(ValueError, match="the model has no chat template"):
        Tokenizer(tokenizer().backend, stop_token_ids=(2,), chat_template=None).encode_chat("hi")


@pytest.mark.parametrize("template", ["{{ raise_exception('no user') }}", "{% for %}"])
def test_a_template_that_fails_is_one_error(template: str) -> None:
    with pytest.raises(ValueError, match="the model's chat template fails: "):
        render_chat(template, [], bos_token="", eos_token="")


def test_a_template_runs_sandboxed() -> None:
    with pytest.raises(ValueError, match="unsafe"):
        render_chat("{{ messages.__class__.__mro__ }}", [], bos_token="", eos_token="")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", " s|-9"),
        ("{{ 'x' * 100000000000 }}", "memory"),
        ("{% for i in range(99999) %}{{ 'x' * 99 }}{% endfor %}", "1048576 characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ messages[9].role.x }}", "no element 9|undefined|no attribute"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "fails"),
    ],
)
def test_a_hostile_template_is_one_error(
    template: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "SECONDS", 2)
    with pytest.raises(ValueError, match=reason):
        render_chat(template, [], bos_token="", eos_token="")
