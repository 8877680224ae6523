"""Instructions that exist on trn3 (NeuronCore-v4) only: calling one says so."""

from __future__ import annotations

from typing import Any, NoReturn

from ..errors import NkiValidationError
from ..tensor import NkiTensor
from .enums import reduce_cmd


def _refuse(name: str, instead: str) -> NoReturn:
    raise NkiValidationError(
        f"nisa.{name} exists on trn3 (NeuronCore-v4) only, the target is trn2; use {instead}"
    )


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
    _refuse("nc_matmul_mx", "nc_matmul with fp8 operands")


def quantize_mx(
    dst: NkiTensor, src: NkiTensor, dst_scale: NkiTensor, name: str | None = None
) -> None:
    """Quantisation to MX formats: trn3 only."""
    _refuse("quantize_mx", "tensor_scalar with an fp8 destination")


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
    name: str | None = None,
) -> None:
    """Activation with two programmable operators: trn3 only."""
    _refuse("activate2", "activation")


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
    _refuse("exponential", "activation(op=nl.exp)")


def rand2(dst: NkiTensor, min: Any, max: Any, name: str | None = None) -> None:
    """Uniform random numbers: trn3 only."""
    _refuse("rand2", "rng and a tensor_scalar")
