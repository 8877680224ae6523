"""Which tests of nki-library the peers benchmark runs: all kernels, sizes that a laptop takes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

_CORE = "test/integration/nkilib/core"
_EXPERIMENTAL = "test/integration/nkilib/experimental"


@dataclass(frozen=True)
class Peer:
    """A kernel, its test file, and shell patterns of the tests to run ("" is all).

    `sizes` takes the place of the tests' own values of these parameters, where all of them are
    those of whole models.
    """

    name: str
    path: str
    select: tuple[str, ...] = ("*",)
    sizes: Mapping[str, int] = field(default_factory=dict)

    def may_select(self, function: str) -> bool:
        """Whether a test of this function can be among those to run, whatever its parameters."""
        return any(fnmatchcase(function, f"*{part.partition('<')[0]}*") for part in self.select)

    def selects(self, test: str) -> bool:
        """Whether a test (with its parameters in brackets) is one of those to run."""
        # fnmatch takes brackets for character classes.
        name = test.replace("[", "<").replace("]", ">")
        return any(fnmatchcase(name, f"*{pattern}*") for pattern in self.select)


PEERS = (
    Peer(
        "attention_cte",
        f"{_CORE}/attention/test_attention_cte.py",
        (
            # causal, one and two cores; a head size of 88 without a mask
            "no_cp_unit<1-128-128",
            "no_cp_vnc_unit<2-1-256-256",
            "no_cp_vnc_unit<2-1-512-512",
            "no_cp_vnc_unit<2-2-577-577-88-1.0-bfloat16",
            # sink and a sliding window of 128
            "no_cp_vnc_unit<2-2-2048-2048-64-1.0-bfloat16-True-False-True-True-128",
            # prefix caching, GQA, context parallelism
            "no_cp_vnc_apc_klr_unit<2-1-256-256-2048-1920",
            "no_cp_vnc_gqa_unit<2-2-1-2048",
            "cp_gqa_klr_unit<False-2-1-512-1024",
        ),
    ),
    Peer(
        "attention_tkg",
        f"{_CORE}/attention/test_attention_tkg.py",
        (
            "fast<bs_4-qh_1-sa_5-sp_1024-spf_10240-d_128-bl_0",
            # block KV cache
            "fast<bs_4-qh_1-sa_5-sp_10240-spf_10240-d_128-bl_16",
        ),
    ),
    Peer(
        "gen_mask_tkg",
        f"{_CORE}/attention/test_gen_mask_tkg.py",
        (
            "test_flat_kv_strided_mask_generation<b-4_qh-1",
            "test_block_kv_mask_generation<b-4_qh-1",
            "test_swa_mask_generation<b-4_qh-1",
            "test_flat_kv<b-4",
        ),
    ),
    Peer("rope", f"{_CORE}/embeddings/test_rope.py", ("test_rope_fast",)),
    Peer("rope_hf", f"{_CORE}/embeddings/test_rope_hf.py", ("lnc",)),
    Peer(
        "rmsnorm_quant",
        f"{_CORE}/rmsnorm/test_rmsnorm_quant.py",
        ("lnc_unit<2-", "vnc_unit<128-"),
    ),
    Peer("cumsum", f"{_CORE}/cumsum/test_cumsum.py", ("test_cumsum_fast",)),
    Peer(
        "cascaded_max",
        f"{_CORE}/max/test_cascaded_max.py",
        ("unit<lnc-1_b-1", "unit<lnc-2_b-1", "unit<lnc-1_b-8_s-5_v-8192", "unit<lnc-2_b-8_s-5"),
    ),
    Peer("cascaded_max_utils", f"{_CORE}/max/test_cascaded_max_utils.py"),
    Peer("router_topk", f"{_CORE}/router_topk/test_router_topk.py", ("topk<T-2_H-", "topk<T-5_H-")),
    Peer(
        "find_nonzero_indices",
        f"{_CORE}/subkernels/test_find_nonzero_indices.py",
        ("<T-4096",),
    ),
    Peer(
        "qkv_cte",
        f"{_CORE}/qkv/test_qkv_cte.py",
        ("accuracy_unit<1-1-128-512", "accuracy_unit<1-1-127", "accuracy_unit<1-1-512-1024"),
    ),
    Peer("qkv_tkg", f"{_CORE}/qkv/test_qkv_tkg.py", ("sb2sb_accuracy_unit<1-4-1-4096",)),
    Peer(
        "mlp_cte",
        f"{_CORE}/mlp/test_mlp_cte.py",
        ("unit<_manual_mlp_cte_config__batch-1_seqlen-512_hidden-1024",),
    ),
    Peer(
        "mlp_tkg",
        f"{_CORE}/mlp/test_mlp_tkg.py",
        ("unit<_manual_mlp_tkg_config__vnc-2_b-4_s-2_h-4096", "vnc-2_b-4_s-1_h-3072"),
    ),
    Peer(
        "output_projection_cte",
        f"{_CORE}/output_projection/test_output_proj_cte.py",
        ("bf16_unit<b-1_s-16_", "bf16_unit<b-1_s-128_"),
    ),
    Peer(
        "output_projection_tkg",
        f"{_CORE}/output_projection/test_output_proj_tkg.py",
        ("tkg_unit<B-4_nh-8_S-4_dh-",),
    ),
    Peer("indexed_flatten", f"{_CORE}/subkernels/test_indexed_flatten.py"),
    Peer("collectives", f"{_EXPERIMENTAL}/collectives/test_collectives.py"),
)

KNOWN = {"core_race": ("test_folded_load_store_dst_batch[lnc-2",)}
"""Tests that a rule refuses rightly (docs/third_party_kernels.md says why), by rule: they are
reported and run with that rule at "warn".
"""
