"""What a configuration refuses, and the buckets it settles."""

import ast
import inspect
import textwrap
from dataclasses import FrozenInstanceError
from itertools import pairwise
from typing import Any

import pytest

from segattn.scheduler import NeuronPolicy, SchedulerConfig

VALID: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_model_len": 100,
    "block_size": 16,
    "num_blocks": 8,
}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_seqs": True}, "max_num_seqs=True"),
        ({"max_model_len": 0}, "max_model_len=0"),
        ({"block_size": 0}, "block_size=0"),
        ({"num_blocks": 1}, "num_blocks=1"),
        ({"max_num_batched_tokens": 3}, "max_num_batched_tokens=3: must be an integer >= 4"),
        ({"enable_chunked_prefill": False}, "max_num_batched_tokens=64: must be >= max_model_len"),
        (
            {
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": 128,
                "max_num_scheduled_tokens": 99,
            },
            "max_num_scheduled_tokens=99: must be >= max_model_len",
        ),
        ({"max_num_scheduled_tokens": 65}, "max_num_scheduled_tokens=65"),
        ({"max_num_scheduled_tokens": 0}, "max_num_scheduled_tokens=0"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold=-1"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens=-1"),
        ({"num_lookahead_tokens": 1.5}, "num_lookahead_tokens=1.5"),
        ({"policy": "lifo"}, "policy='lifo'"),
        ({"watermark": -0.1}, "watermark=-0.1"),
        ({"watermark": 1.5}, "watermark=1.5"),
        ({"watermark": "0.5"}, "watermark='0.5'"),
        ({"watermark": True}, "watermark=True"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching='no': must be True or False"),
        ({"enable_chunked_prefill": None}, "enable_chunked_prefill=None: must be True or False"),
        ({"scheduler_reserve_full_isl": 1}, "scheduler_reserve_full_isl=1: must be True or False"),
        ({"num_batched_tokens_buckets": 64}, "num_batched_tokens_buckets=64: must be a list"),
        ({"num_seqs_buckets": ["4"]}, r"num_seqs_buckets=\['4'\]: must be a list of integers"),
        ({"num_batched_tokens_buckets": [32, 16, 64]}, "num_batched_tokens_buckets"),
        ({"num_batched_tokens_buckets": [32]}, "num_batched_tokens_buckets"),
        ({"num_seqs_buckets": [1, 2]}, "num_seqs_buckets"),
    ],
)
def test_a_bad_value_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SchedulerConfig(**{**VALID, **change})


def test_default_buckets_end_in_the_largest_step() -> None:
    config = SchedulerConfig(6, 1000, 700, 16, 8)
    assert config.prefill_buckets == (128, 256, 512, 700)
    assert config.decode_buckets == (1, 2, 4, 6)


def test_given_buckets_are_kept() -> None:
    config = SchedulerConfig(**VALID, num_batched_tokens_buckets=[16, 64], num_seqs_buckets=[2, 4])
    assert config.prefill_buckets == (16, 64)
    assert config.decode_buckets == (2, 4)


def test_the_token_budget_of_a_step_can_be_lowered() -> None:
    assert SchedulerConfig(**VALID).step_token_budget == 64
    assert SchedulerConfig(**VALID, max_num_scheduled_tokens=7).step_token_budget == 7


def test_a_refusal_says_what_is_allowed() -> None:
    with pytest.raises(ValueError, match=r"^block_size=0: must be an integer >= 1$"):
        SchedulerConfig(**{**VALID, "block_size": 0})
    with pytest.raises(ValueError, match=r"=65: must be an integer >= 1 and <= 64$"):
        SchedulerConfig(**VALID, max_num_scheduled_tokens=65)


@pytest.mark.parametrize("watermark", [0.0, 1.0])
def test_a_watermark_may_be_nothing_or_everything(watermark: float) -> None:
    assert SchedulerConfig(**VALID, watermark=watermark).watermark == watermark


def test_a_configuration_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        SchedulerConfig(**VALID).max_num_seqs = 3  # type: ignore[misc]  # what it refuses


@pytest.mark.parametrize("cls", [SchedulerConfig, NeuronPolicy])
def test_every_field_says_what_it_means(cls: type) -> None:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    for field, after in pairwise(tree.body):
        if isinstance(field, ast.AnnAssign) and ast.unparse(field.target) != "_":
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            assert is_text, ast.unparse(field.target)
