"""API that NKI removed, renamed or deprecated up to 0.7.0, with what to write instead.

Source: the migration guide, the release notes and the API stubs of the public documentation.
"""

import difflib
import inspect
import sys
from collections.abc import Iterable
from typing import NamedTuple


class Change(NamedTuple):
    """What happened to a name, and its replacement ("" if there is none)."""

    what: str
    replacement: str


_REMAINDER = "nl.bitwise_and for powers of two, else x minus y times the quotient as an integer"
_SLICES = "slices, or .ap() for other access patterns"
_BENCHMARK = "nki.simulate for values, neuron-profile for time"

REMOVED = {
    "nki.language.dynamic_range": Change("removed in 0.7.0", "nl.fori_loop(lower, upper, body)"),
    "nki.language.arange": Change("removed in 0.2.0", _SLICES),
    "nki.language.mgrid": Change("removed in 0.2.0", _SLICES),
    "nki.language.par_dim": Change("removed in 0.2.0", "dim 0, which is the partition dim"),
    "nki.tensor": Change("moved in 0.2.0", "nki.meta.tensor"),
    "nki.isa.tensor_copy_dynamic_src": Change(
        "removed in 0.4.0", "nisa.tensor_copy(dst, src.ap(pattern, scalar_offset=register))"
    ),
    "nki.isa.tensor_copy_dynamic_dst": Change(
        "removed in 0.4.0", "nisa.tensor_copy(dst.ap(pattern, scalar_offset=register), src)"
    ),
}

# Entry points of the host, reported wherever the file uses them.
HOST = {
    "nki.benchmark": Change("absent since 0.2.0", _BENCHMARK),
    "nki.profile": Change("absent since 0.2.0", _BENCHMARK),
    "nki.baremetal": Change("absent since 0.2.0", "nki.jit and a call with NumPy arrays"),
    "nki.simulate_kernel": Change("absent since 0.2.0", "nki.simulate(kernel)(...)"),
    "jax_neuronx.nki_call": Change("dropped", "nki.jit and a call with JAX arrays"),
}

# Names that NKI 0.7 does not have, whatever they were meant to be.
ABSENT = {
    "nki.language.bool": "nl.bool_",
    "nki.language.fp32": "nl.float32",
    "nki.language.fp16": "nl.float16",
    "nki.language.bf16": "nl.bfloat16",
    "nki.language.float64": "nl.float32",
    "nki.language.range": "range",
    "nki.language.static_cast": "nl.copy(x, dtype=...), or nisa.tensor_copy to a tile of the dtype",
    "nki.language.loop_reduce": "a sum in SBUF, or nisa.nc_matmul that accumulates in PSUM",
    "nki.language.spmd_dim": "kernel[2], one number of cores",
    "nki.language.nc": "kernel[2], one number of cores",
}

UNSUPPORTED = {
    "nki.language.divide": Change(
        "not a hardware operation", "nl.multiply by nl.reciprocal, or nisa.reciprocal"
    ),
    "nki.language.mod": Change("not a hardware operation, only simulated", _REMAINDER),
    "nki.language.fmod": Change("not a hardware operation, only simulated", _REMAINDER),
}

DEPRECATED = {
    "nki.language.static_range": Change("deprecated", "range"),
    "nki.language.affine_range": Change("deprecated", "range"),
    "nki.language.sequential_range": Change("deprecated", "range"),
    "nki.isa.tensor_engine": Change("deprecated", "nisa.engine.tensor"),
    "nki.isa.vector_engine": Change("deprecated", "nisa.engine.vector"),
    "nki.isa.scalar_engine": Change("deprecated", "nisa.engine.scalar"),
    "nki.isa.gpsimd_engine": Change("deprecated", "nisa.engine.gpsimd"),
    "nki.isa.unknown_engine": Change("deprecated", "nisa.engine.unknown"),
    "nki.isa.activation_reduce": Change(
        "kept for compatibility only", "nisa.activation with reduce_op, reduce_res and reduce_cmd"
    ),
    "nki.language.tile_size.psum_fmax": Change(
        "deprecated in 0.4.0", "nl.tile_size.psum_bank_fmax"
    ),
    "nki.language.tile_size.total_available_sbuf_size": Change(
        "deprecated in 0.4.0", "nl.tile_size.sbuf_fmax_bytes or nl.tile_size.sbuf_size_bytes"
    ),
}

ABSENT_OF_TENSORS = {
    "T": ".permute for HBM and free dimensions, nisa.nc_transpose for partitions",
    "transpose": ".permute for HBM and free dimensions, nisa.nc_transpose for partitions",
    "broadcast_to": ".broadcast",
    "expand_dims": ".expand_dim",
    "squeeze": ".squeeze_dim",
    "flatten": ".flatten_dims",
    "astype": "nisa.tensor_copy to a tile of the dtype",
    "item": "nisa.scalar_load",
    "copy": "nisa.tensor_copy to a new tile",
}

# (function, keyword): "" stands for every function of nki.isa and nki.language.
REMOVED_KEYWORDS = {
    ("", "mask"): Change("removed in 0.2.0", _SLICES),
    ("nki.isa.dma_copy", "dst_rmw_op"): Change(
        "removed in 0.3.0", "nisa.dma_compute(dst, [src, dst], reduce_op=...)"
    ),
    ("nki.isa.dma_copy", "unique_indices"): Change(
        "removed in 0.3.0", "nisa.dma_compute(dst, srcs, reduce_op, unique_indices=...)"
    ),
    ("nki.isa.sendrecv", "use_gpsimd_dma"): Change(
        "replaced in 0.3.0", "dma_engine=nisa.dma_engine.gpsimd_dma or nisa.dma_engine.dma"
    ),
    ("nki.isa.register_move", "imm"): Change("renamed in 0.3.0", "src="),
    ("nki.isa.nc_matmul", "psumAccumulateFlag"): Change("removed in 0.2.0", "accumulate="),
    ("nki.isa.nc_matmul", "is_moving_zero"): Change("renamed in 0.2.0", "is_moving_onezero="),
    ("nki.jit", "platform_target"): Change(
        "an error since 0.3.0", "the environment variable NEURON_PLATFORM_TARGET_OVERRIDE"
    ),
}

# The ring's channels: which keyword a collective has instead of num_channels.
NUM_CHANNELS = {
    "channel_ids": Change("replaced in 0.3.0", "channel_ids=[0, ..., num_channels - 1]"),
    "channel_id": Change(
        "removed in 0.3.0",
        "channel_id alone; channel_ids=[...] of ncc.collective_permute_implicit says how many",
    ),
}

# Keywords of return-style calls: the destination has them now.
OF_DESTINATION = ("dtype", "shape", "buffer")

_CAST = "nothing: the dtype of dst decides"
DEPRECATED_KEYWORDS = {
    ("nki.isa.tensor_copy", "dtype"): Change("ignored since 0.3.0", _CAST),
    ("nki.isa.scalar_tensor_tensor", "dtype"): Change("ignored since 0.3.0", _CAST),
    ("nki.jit", "mode"): Change("ignored since 0.3.0", "nothing: the framework is detected"),
}


def short(name: str) -> str:
    """A full name the way kernels write it: nisa.dma_copy, nl.ndarray."""
    for full, alias in (("nki.isa", "nisa"), ("nki.language", "nl"), ("nki.collectives", "ncc")):
        if name.startswith(full + "."):
            return alias + name.removeprefix(full)
    return name


def closest(word: str, known: Iterable[str]) -> str:
    """The known name that a word is probably a misspelling of, "" if none is near.

    Of equally near ones the first: op is more likely op0 than op1.
    """
    names = list(known)
    near = [(difflib.SequenceMatcher(None, name, word).ratio(), name) for name in names]
    ratio, name = max(near, key=lambda pair: pair[0], default=(0.0, ""))
    return name if ratio >= 0.75 else ""


def missing_name(module: str, name: str, known: Iterable[str]) -> AttributeError:
    """The error for a name that a module does not have."""
    full = f"{module}.{name}"
    change = REMOVED.get(full) or HOST.get(full)
    if change is not None:
        return AttributeError(f"{short(full)}: {change.what}; use {change.replacement}")
    instead = ABSENT.get(full) or closest(name, known)
    return AttributeError(
        f"{short(full)} is not part of NKI 0.7" + (f"; use {instead}" if instead else "")
    )


def missing_attribute(name: str, known: Iterable[str]) -> AttributeError:
    """The error for an attribute that NkiTensor does not have."""
    instead = ABSENT_OF_TENSORS.get(name) or closest(name, known)
    return AttributeError(
        f"NkiTensor.{name} is not part of NKI 0.7" + (f"; use {instead}" if instead else "")
    )


def keyword_hint(function: str, keyword: str) -> str:
    """What to write instead of a keyword that a function does not take, "" if unknown."""
    for (name, removed), change in REMOVED_KEYWORDS.items():
        if removed == keyword and name.rpartition(".")[2] in ("", function):
            return f"{change.what}; use {change.replacement}"
    package = __name__.rpartition(".")[0]
    for module in ("isa", "language", "collectives"):
        found = vars(sys.modules.get(f"{package}.{module}", sys)).get(function)
        if inspect.isfunction(found):
            near = closest(keyword, inspect.signature(found).parameters)
            return f"use {near}=" if near else ""
    return ""
