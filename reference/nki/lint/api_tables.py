"""API that NKI removed, renamed or deprecated up to 0.6.0, with what to write instead.

Source: the migration guide, the release notes and the API stubs of the public documentation.
"""

from typing import NamedTuple


class Change(NamedTuple):
    """What happened to a name, and its replacement ("" if there is none)."""

    what: str
    replacement: str


_SLICES = "slices, or .ap() for other access patterns"
_BENCHMARK = "nki.simulate for values, neuron-profile for time"

REMOVED = {
    "nki.language.arange": Change("removed in 0.2.0", _SLICES),
    "nki.language.mgrid": Change("removed in 0.2.0", _SLICES),
    "nki.language.par_dim": Change("removed in 0.2.0", "dim 0, which is the partition dim"),
    "nki.tensor": Change("moved in 0.2.0", "nki.meta.tensor"),
    "nki.isa.tensor_copy_dynamic_src": Change(
        "removed in 0.4.0", "nisa.tensor_copy with src.ap(scalar_offset=...)"
    ),
    "nki.isa.tensor_copy_dynamic_dst": Change(
        "removed in 0.4.0", "nisa.tensor_copy with dst.ap(scalar_offset=...)"
    ),
    "nki.benchmark": Change("absent since 0.2.0", _BENCHMARK),
    "nki.profile": Change("absent since 0.2.0", _BENCHMARK),
    "nki.baremetal": Change("absent since 0.2.0", "a call with NumPy arrays"),
    "nki.simulate_kernel": Change("absent since 0.2.0", "nki.simulate(kernel)(...)"),
}

UNSUPPORTED = {
    "nki.language.divide": Change(
        "not a hardware operation", "nl.multiply by nl.reciprocal, or nisa.reciprocal"
    ),
    "nki.language.mod": Change("not a hardware operation, only simulated", "index arithmetic"),
    "nki.language.fmod": Change("not a hardware operation, only simulated", "index arithmetic"),
}

DEPRECATED = {
    "nki.language.static_range": Change("deprecated", "range"),
    "nki.language.affine_range": Change("deprecated", "range"),
    "nki.language.sequential_range": Change("deprecated", "range"),
    "nki.language.dynamic_range": Change("deprecated in 0.6.0", "nl.fori_loop(lower, upper, body)"),
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

# (function, keyword): "" stands for every function of nki.isa and nki.language.
REMOVED_KEYWORDS = {
    ("", "mask"): Change("removed in 0.2.0", _SLICES),
    ("nki.isa.dma_copy", "dst_rmw_op"): Change("removed in 0.3.0", "nisa.dma_compute"),
    ("nki.isa.dma_copy", "unique_indices"): Change("removed in 0.3.0", "nisa.dma_compute"),
    ("nki.isa.sendrecv", "use_gpsimd_dma"): Change(
        "replaced in 0.3.0", "dma_engine=nisa.dma_engine.gpsimd_dma or nisa.dma_engine.dma"
    ),
    ("nki.isa.register_move", "imm"): Change("renamed in 0.3.0", "src="),
    ("nki.isa.nc_matmul", "psumAccumulateFlag"): Change("removed in 0.2.0", "accumulate="),
    ("nki.isa.nc_matmul", "is_moving_zero"): Change("renamed in 0.2.0", "is_moving_onezero="),
    ("nki.collectives.collective_permute_implicit", "num_channels"): Change(
        "replaced in 0.3.0", "channel_ids=[...]"
    ),
    (
        "nki.collectives.collective_permute_implicit_current_processing_rank_id",
        "num_channels",
    ): Change("removed in 0.3.0", "channel_id= alone"),
    ("nki.jit", "platform_target"): Change(
        "an error since 0.3.0", "the environment variable NEURON_PLATFORM_TARGET_OVERRIDE"
    ),
}

_CAST = "nothing: the dtype of dst decides"
DEPRECATED_KEYWORDS = {
    ("nki.isa.tensor_copy", "dtype"): Change("ignored since 0.3.0", _CAST),
    ("nki.isa.scalar_tensor_tensor", "dtype"): Change("ignored since 0.3.0", _CAST),
    ("nki.jit", "mode"): Change("ignored since 0.3.0", "nothing: the framework is detected"),
}
