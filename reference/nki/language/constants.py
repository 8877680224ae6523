"""Constants of `nki.language`: dtypes, buffers, tile sizes, operator-only names."""

from __future__ import annotations

import os
from typing import Any, Final

from ..core import current
from ..nkiobject import NKIObject
from ..ops import token
from ..regions import (
    NUM_PARTITIONS,
    PRIVATE_HBM,
    PSUM,
    PSUM_BANK_BYTES,
    PSUM_NUM_BANKS,
    SBUF,
    SBUF_PARTITION_BYTES,
    SBUF_USABLE_BYTES,
    SHARED_HBM,
)
from ..strict import violation

DType = str
bool_ = "bool_"
int8 = "int8"
int16 = "int16"
int32 = "int32"
int64 = "int64"
uint8 = "uint8"
uint16 = "uint16"
uint32 = "uint32"
float16 = "float16"
bfloat16 = "bfloat16"
float32 = "float32"
tfloat32 = "tfloat32"
float8_e4m3 = "float8_e4m3"
float8_e4m3fn = "float8_e4m3fn"
float8_e5m2 = "float8_e5m2"
float8_e8m0fnu = "float8_e8m0fnu"
float8_e5m2_x4 = "float8_e5m2_x4"
float8_e4m3fn_x4 = "float8_e4m3fn_x4"
float4_e2m1fn_x4 = "float4_e2m1fn_x4"

sbuf = SBUF
psum = PSUM
private_hbm = hbm = PRIVATE_HBM
shared_hbm = SHARED_HBM


class _TileSize(NKIObject):
    """Tile limits of trn2."""

    pmax: Final = 128
    psum_bank_fmax: Final = 512
    psum_bank_fmax_bytes: Final = PSUM_BANK_BYTES
    gemm_stationary_fmax: Final = 128
    gemm_moving_fmax: Final = 512
    bn_stats_fmax: Final = 512
    psum_min_align: Final = 4
    sbuf_min_align: Final = 1

    @property
    def psum_num_banks(self) -> int:
        """PSUM banks; one is reserved when DMA transposes run on the Tensor Engine."""
        as_pe = os.environ.get("NKI_DMA_TRANSPOSE_AS_PE_TRANSPOSE", "").lower()
        return PSUM_NUM_BANKS - (as_pe in ("1", "true"))

    @property
    def sbuf_size_bytes(self) -> int:
        """Physical bytes of SBUF, all partitions together."""
        return NUM_PARTITIONS * SBUF_PARTITION_BYTES

    @property
    def sbuf_fmax_bytes(self) -> int:
        """Usable bytes of SBUF per partition."""
        return SBUF_USABLE_BYTES

    @property
    def sbuf_fmax(self) -> int:
        """Usable float32 elements of SBUF per partition."""
        return SBUF_USABLE_BYTES // 4

    @property
    def psum_fmax(self) -> int:
        """The old name of psum_bank_fmax; deprecated since 0.4.0."""
        violation("deprecated", "nl.tile_size.psum_fmax is deprecated; use psum_bank_fmax")
        return 512

    @property
    def total_available_sbuf_size(self) -> int:
        """The old name of sbuf_fmax_bytes; deprecated since 0.4.0."""
        violation(
            "deprecated",
            "nl.tile_size.total_available_sbuf_size is deprecated; use sbuf_fmax_bytes",
        )
        return SBUF_USABLE_BYTES


tile_size = _TileSize()


@token
def average(*_: Any) -> None:
    """Operator token of tensor_partition_reduce."""
    raise TypeError("nl.average is an operator of nisa.tensor_partition_reduce, not a function")


@token
def prelu(*_: Any) -> None:
    """Activation token."""
    raise TypeError("nl.prelu is an activation function of nisa.activation, not a function")


@token
def bypass(*_: Any) -> None:
    """Operator token: the first operand unchanged."""
    raise TypeError("nl.bypass is an operator of nki.isa, not a function")


def program_id(axis: int = 0) -> int:
    """Number of this core in the launch, 0 or 1."""
    _check_axis(axis)
    return current().index


def num_programs(axes: Any = 0) -> int:
    """Cores of the launch, 1 or 2."""
    if isinstance(axes, int):
        _check_axis(axes)
    return current().num_cores


def program_ndim() -> int:
    """1 for kernel[n](...), 0 for kernel(...)."""
    return 1 if current().has_grid else 0


def _check_axis(axis: int) -> None:
    if axis != 0:
        raise ValueError(f"grid axis {axis}; the grid has one axis, 0")
