"""`nki.isa`: the instructions of the trn2 engines."""

from typing import TYPE_CHECKING

from ..changes import missing_name
from ..errors import NkiValidationError
from ..language.binary import equal, maximum
from ..nkiobject import NKIObject
from ..registers import VirtualRegister
from ..strict import violation
from ..tensor import NkiTensor
from .activation import activation, activation_reduce
from .copies import memset, tensor_copy, tensor_copy_predicated
from .cores import core_barrier, sendrecv
from .dma import dma_copy
from .dma_compute import dma_compute
from .dma_transpose import dma_transpose
from .enums import (
    NkiInstruction,
    dge_mode,
    dma_engine,
    engine,
    matmul_perf_mode,
    nc_version,
    oob_mode,
    reduce_cmd,
)
from .gathers import local_gather, nc_n_gather, nc_stream_shuffle
from .gpsimd import nonzero_with_count, sequence_bounds, tensor_partition_reduce, topk
from .matmul import nc_matmul
from .random import dropout, rand_get_state, rand_set_state, rng, set_rng_seed
from .reduce import tensor_reduce, tensor_scalar_reduce
from .register_moves import (
    get_nc_sub_version,
    get_nc_version,
    register_alloc,
    register_load,
    register_move,
    register_store,
)
from .scalars import NkiScalar, scalar_load, scalar_store
from .scan import tensor_scalar_cumulative, tensor_tensor_scan
from .select import affine_select, iota
from .select_reduce import range_select, select_reduce
from .statistics import bn_aggr, bn_stats, max8, nc_find_index8, nc_match_replace8
from .tensor_ops import reciprocal, scalar_tensor_tensor, tensor_tensor
from .tensor_scalar import tensor_scalar
from .transpose import nc_transpose
from .trn3 import activate2, exponential, nc_matmul_mx, quantize_mx, rand2

__all__ = [
    "NKIObject",
    "NkiInstruction",
    "NkiScalar",
    "NkiTensor",
    "NkiValidationError",
    "VirtualRegister",
    "activate2",
    "activation",
    "activation_reduce",
    "affine_select",
    "bn_aggr",
    "bn_stats",
    "core_barrier",
    "dge_mode",
    "dma_compute",
    "dma_copy",
    "dma_engine",
    "dma_transpose",
    "dropout",
    "engine",
    "equal",
    "exponential",
    "get_nc_sub_version",
    "get_nc_version",
    "gpsimd_engine",
    "iota",
    "local_gather",
    "matmul_perf_mode",
    "max8",
    "maximum",
    "memset",
    "nc_find_index8",
    "nc_match_replace8",
    "nc_matmul",
    "nc_matmul_mx",
    "nc_n_gather",
    "nc_stream_shuffle",
    "nc_transpose",
    "nc_version",
    "nonzero_with_count",
    "oob_mode",
    "quantize_mx",
    "rand2",
    "rand_get_state",
    "rand_set_state",
    "range_select",
    "reciprocal",
    "reduce_cmd",
    "register_alloc",
    "register_load",
    "register_move",
    "register_store",
    "rng",
    "scalar_engine",
    "scalar_load",
    "scalar_store",
    "scalar_tensor_tensor",
    "select_reduce",
    "sendrecv",
    "sequence_bounds",
    "set_rng_seed",
    "tensor_copy",
    "tensor_copy_predicated",
    "tensor_engine",
    "tensor_partition_reduce",
    "tensor_reduce",
    "tensor_scalar",
    "tensor_scalar_cumulative",
    "tensor_scalar_reduce",
    "tensor_tensor",
    "tensor_tensor_scan",
    "topk",
    "unknown_engine",
    "vector_engine",
]

if not TYPE_CHECKING:  # a type checker would take any name for one that exists

    def __getattr__(name: str) -> object:
        """Names of earlier releases: AttributeError says what to write instead."""
        if name.endswith("_engine") and name[:-7] in engine.__members__:
            violation("deprecated", f"nisa.{name} is deprecated; use nisa.engine.{name[:-7]}")
            return engine[name[:-7]]
        raise missing_name("nki.isa", name, __all__)
