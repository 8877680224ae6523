"""Instructions that exist on trn3 (NeuronCore-v4) only: calling one says so."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from ..errors import NkiValidationError
from ..tensor import NkiTensor
from .enums import engine, reduce_cmd


def _trn3_only(instead: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Keep the signature and refuse every call, whatever its arguments."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def refuse(*_: object, **__: object) -> None:
            raise NkiValidationError(
                f"nisa.{function.__name__} exists on trn3 (NeuronCore-v4) only, the target is "
                f"trn2; use {instead}"
            )

        return refuse

    return decorate


@_trn3_only("nc_matmul with fp8 operands")
def nc_matmul_mx(
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    stationary_scale: NkiTensor,
    moving_scale: NkiTensor,
    tile_position: Any = None,
    tile_size: Any = None,
    accumulate: bool | None = None,
    name: str | None = None,
) -> None:
    """Microscaled matmul: trn3 only."""


@_trn3_only("tensor_scalar with an fp8 destination")
def quantize_mx(
    dst: NkiTensor, src: NkiTensor, dst_scale: NkiTensor, name: str | None = None
) -> None:
    """Quantisation to MX formats: trn3 only."""


@_trn3_only("activation")
def activate2(
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    imm0: Any,
    imm1: Any,
    op0: Any,
    op1: Any,
    relu_param: Any = 0.0,
    reverse0: bool = False,
    reverse1: bool = False,
    reduce_op: Any = None,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: reduce_cmd = reduce_cmd.idle,
    engine: engine = engine.scalar,
    name: str | None = None,
) -> None:
    """Activation with two programmable operators: trn3 only."""


@_trn3_only("activation(op=nl.exp)")
def exponential(
    dst: NkiTensor,
    src: NkiTensor,
    max_value: Any = 0.0,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: reduce_cmd = reduce_cmd.idle,
    reduce_init: Any = 0.0,
    name: str | None = None,
) -> None:
    """Exponential on the Vector Engine: trn3 only."""


@_trn3_only("rng and a tensor_scalar")
def rand2(dst: NkiTensor, min: Any, max: Any, name: str | None = None) -> None:
    """Uniform random numbers: trn3 only."""
