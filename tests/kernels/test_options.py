"""Options of the public functions: one definition, and a signature that lists them."""

import inspect
from typing import Any

import numpy as np
import pytest

from segattn import kernels
from segattn.kernels import options
from segattn.kernels.options import with_defaults
from segattn.tests.kernels.prefill_call import prefill_arrays

DEFINED: dict[Any, Any] = {
    options.AttentionOptions: options.ATTENTION,
    options.SegmentedOptions: options.SEGMENTED,
    options.PlanOptions: options.PLAN,
    options.DecodeOptions: options.DECODE,
}


@pytest.mark.parametrize("kind", DEFINED, ids=lambda kind: kind.__name__)
def test_every_option_has_a_default(kind: Any) -> None:
    assert set(kind.__annotations__) == set(DEFINED[kind])


def test_the_signature_lists_every_option_with_its_default() -> None:
    signature = inspect.signature(kernels.segmented_attention)
    assert str(signature.parameters["kv_segment_size"]) == "kv_segment_size=2048"
    assert str(signature.parameters["softmax"]) == "softmax='auto'"
    assert not [p for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
    assert list(signature.parameters)[:3] == ["q", "k", "v"]
    prepared = inspect.signature(kernels.prepare_segmented_attention)
    assert signature.parameters == prepared.parameters
    assert inspect.signature(kernels.write_kv_cache).return_annotation == tuple[Any, Any]


def test_a_misspelt_option_is_an_error_and_nothing_is_written() -> None:
    call = prefill_arrays(np.float32)
    misspelt: dict[str, Any] = {"sofmax": "exact"}
    with pytest.raises(TypeError, match=r"padded_prefill\(\) has no option 'sofmax'"):
        kernels.padded_prefill(**call, num_tokens=5, **misspelt)
    assert not call["k_cache"].any()


def test_a_function_finds_every_option_given_or_not() -> None:
    @with_defaults({"a": 1, "b": 2})
    def found(x: int, **given: int) -> tuple[int, dict[str, int]]:
        return x, given

    assert found(0, b=3) == (0, {"a": 1, "b": 3})
    assert found(x=5) == (5, {"a": 1, "b": 2})
