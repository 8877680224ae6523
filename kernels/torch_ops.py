"""The kernels as torch operators, `torch.ops.segattn.*`; importing this file registers them.

    segmented_attention, paged_decode   -> out
    padded_prefill                      -> out; writes the caches, which it does not return
    write_kv_cache                      -> nothing; writes the caches

Arguments, meanings and errors are those of `segattn.kernels`, on CPU tensors, except that scales
of caches are tensors. `num_tokens` and `prior_tokens` are ints or, in the overload `.tensor`,
int32 tensors of one element, which a compiled graph does not specialise on. The schemas declare
which caches are written (`Tensor(a!)`), and a fake kernel gives the shape of every result, so that
a model compiles as one full graph. No gradient is defined: `backward` through them raises.
"""

import re
from collections.abc import Callable
from typing import Any

from .. import kernels
from ..reference.extras import MissingExtraError

try:
    import torch
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

_SCALES = "Tensor? k_scale=None, Tensor? v_scale=None"
_CACHES = f"{_SCALES}, bool k_pre_transposed=False"
_OPTIONS = (
    "float? scale=None, float softcap=0.0, int? sliding_window=None, Tensor? sinks=None, "
    f'{_CACHES}, str softmax="auto", int lnc=1, bool causal=True, '
    "str? deterministic=None"
)


def _attention(q: Any, k: Any, v: Any, k_cache: Any, v_cache: Any, *others: Any) -> Any:
    """The result of a prefill: rows as wide as values."""
    return q.new_empty((*q.shape[:-1], v_cache.shape[-1]))


def _decoded(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_tables: Any,
    context_lens: Any,
    value_dim: int | None = None,
    *others: Any,
) -> Any:
    """The result of a decode: rows as wide as values."""
    return q.new_empty((*q.shape[:-1], value_dim if v_cache is None else v_cache.shape[-1]))


def _nothing(*arguments: Any) -> None:
    """No result."""


def _check_devices(names: tuple[str, ...], arguments: tuple[Any, ...]) -> None:
    """All tensors are on one device: torch takes the fake kernel if a single one is on meta."""
    first = arguments[0].device
    for name, argument in zip(names, arguments, strict=False):
        if isinstance(argument, torch.Tensor) and argument.device != first:
            raise ValueError(f"{name}: device {argument.device} must be {first} as {names[0]}")


def _register(
    name: str, schema: str, host: Callable[..., Any], fake: Callable[..., Any], *written: str
) -> None:
    """Make a host function the operator `segattn::name`, whose results `fake` describes.

    torch leaves out the last arguments where they have their default. An operator returns no
    argument, hence no cache.
    """
    names = tuple(re.findall(r"(\w+)(?:=[^,)]*)?[,)]", schema.partition("->")[0]))

    def function(*arguments: Any) -> Any:
        result = host(**dict(zip(names, arguments, strict=False)))
        if not written:
            return result
        return result[0] if fake is _attention else None

    def describe(*arguments: Any) -> Any:
        _check_devices(names, arguments)
        return fake(*arguments)

    operator = torch.library.custom_op(
        f"segattn::{name}", function, mutates_args=written, device_types="cpu", schema=schema
    )
    operator.register_fake(describe)


# torch tries overloads in this order and would read a tensor for an int.
for _suffix, _length in ((".tensor", "Tensor"), ("", "SymInt")):
    _register(
        f"segmented_attention{_suffix}",
        "(Tensor q, Tensor? k, Tensor? v, Tensor k_cache, Tensor v_cache, Tensor block_table, "
        f"{_length} prior_tokens, {_length} num_tokens, int kv_segment_size=2048, {_OPTIONS}) "
        "-> Tensor",
        kernels.segmented_attention,
        _attention,
    )
    _register(
        f"padded_prefill{_suffix}",
        "(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, "
        f"Tensor slot_mapping, {_length} num_tokens, {_OPTIONS}) -> Tensor",
        kernels.padded_prefill,
        _attention,
        "k_cache",
        "v_cache",
    )
_register(
    "paged_decode",
    "(Tensor q, Tensor k_cache, Tensor? v_cache, Tensor block_tables, Tensor context_lens, "
    f"int? value_dim=None, Tensor? query_lens=None, Tensor? tree_mask=None, {_OPTIONS}) -> Tensor",
    kernels.paged_decode,
    _decoded,
)
_register(
    "write_kv_cache",
    "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, "
    f"{_CACHES}) -> ()",
    kernels.write_kv_cache,
    _nothing,
    "k_cache",
    "v_cache",
)
