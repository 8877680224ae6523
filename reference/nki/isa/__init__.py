"""`nki.isa`: the instructions of the trn2 engines."""

from ..errors import NkiValidationError
from ..language.binary import equal, maximum
from ..nkiobject import NKIObject
from ..registers import VirtualRegister
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
from .matmul import nc_matmul
from .reduce import tensor_reduce, tensor_scalar_reduce
from .register_moves import (
    get_nc_sub_version,
    get_nc_version,
    register_alloc,
    register_load,
    register_move,
    register_store,
)
from .select import affine_select, iota
from .select_reduce import range_select, select_reduce
from .tensor_ops import reciprocal, scalar_tensor_tensor, tensor_tensor
from .tensor_scalar import tensor_scalar
from .transpose import nc_transpose

tensor_engine = engine.tensor
vector_engine = engine.vector
scalar_engine = engine.scalar
gpsimd_engine = engine.gpsimd
unknown_engine = engine.unknown

__all__ = [
    "NKIObject",
    "NkiInstruction",
    "NkiTensor",
    "NkiValidationError",
    "VirtualRegister",
    "activation",
    "activation_reduce",
    "affine_select",
    "core_barrier",
    "dge_mode",
    "dma_compute",
    "dma_copy",
    "dma_engine",
    "dma_transpose",
    "engine",
    "equal",
    "get_nc_sub_version",
    "get_nc_version",
    "gpsimd_engine",
    "iota",
    "matmul_perf_mode",
    "maximum",
    "memset",
    "nc_matmul",
    "nc_transpose",
    "nc_version",
    "oob_mode",
    "range_select",
    "reciprocal",
    "reduce_cmd",
    "register_alloc",
    "register_load",
    "register_move",
    "register_store",
    "scalar_engine",
    "scalar_tensor_tensor",
    "select_reduce",
    "sendrecv",
    "tensor_copy",
    "tensor_copy_predicated",
    "tensor_engine",
    "tensor_reduce",
    "tensor_scalar",
    "tensor_scalar_reduce",
    "tensor_tensor",
    "unknown_engine",
    "vector_engine",
]
