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
    Peer("rmsnorm_tkg", f"{_CORE}/subkernels/test_rmsnorm_tkg.py"),
    Peer("layernorm_tkg", f"{_CORE}/subkernels/test_layernorm_tkg.py", ("tkg_unit<",)),
    Peer(
        "topk", f"{_CORE}/topk/test_topk.py", ("topk_unit<lnc-2_b-?_", "topk_unsorted<lnc-2_b-?_")
    ),
    Peer(
        "attention_bwd",
        f"{_CORE}/attention/test_attention_bwd.py",
        (
            "packing<qh-1_kvh-1_dh-128_dt-bfloat16_seqs-128x128_",
            "fast<b-1_qh-1_kvh-1_s-2048",
            "fast<b-1_qh-3_kvh-3_s-2048_dh-128_dt-float32_causal-0",
        ),
    ),
    Peer(
        "moe_tkg",
        f"{_CORE}/moe/moe_tkg/test_moe_tkg.py",
        (
            "bfloat16<vnc-2_t-4_h-384",
            "bfloat16<vnc-2_t-4_h-3072_i-192_e-4_",
            "bfloat16<vnc-2_t-4_h-3072_i-128_e-8_",
            "sbuf_io<vnc-2_t-4",
            "sweep<vnc-2_t-1_h-3072_i-256_e-4",
            "sweep<vnc-2_t-4_h-4096_i-256_e-4_k-1_act-3_scaling-1",
        ),
    ),
    Peer(
        "moe_cte",
        f"{_CORE}/moe/moe_cte/test_moe_cte.py",
        ("SHARD_ON_BLOCK-3072-1024-8-256-4-384", "INTERMEDIATE-3072-1024-8-512-4-2048-bfloat16-0"),
        {"hidden": 1024, "tokens": 512, "intermediate": 256, "block_size": 256, "top_k": 2},
    ),
    Peer(
        "moe_cte_dropping",
        f"{_CORE}/moe/moe_cte/test_moe_cte.py",
        ("INTERMEDIATE_DROPPING-4096-4096-2",),
        {"hidden": 512, "tokens": 2048, "intermediate": 256, "block_size": 1024},
    ),
    Peer(
        "moe_cte_unified",
        f"{_CORE}/moe/moe_cte/test_moe_cte_unified.py",
        ("unified<*impl-0", "unified<*impl-1", "unified<*impl-2", "unified<*impl-4"),
        {"hid": 1024, "tok": 512, "int": 256, "bs": 256, "k": 2},
    ),
    Peer(
        "moe_block_tkg",
        f"{_CORE}/moe_block/test_moe_block_tkg.py",
        ("unit<ln-2_ae-0_ba-[18]_sq-1_*wd-float16", "unit<ln-2_ae-1_ba-16_*wd-bfloat16"),
        {
            "hidden": 1024,
            "intermediate": 128,
            "num_global_experts": 16,
            "num_local_experts": 16,
            "top_k": 4,
        },
    ),
    Peer("tensor_view", f"{_CORE}/utils/test_tensor_view.py"),
    Peer("tp_broadcast", f"{_CORE}/utils/test_tp_broadcast.py"),
    Peer("cross_partition_copy", f"{_CORE}/utils/test_cross_partition_copy.py"),
    Peer("collectives", f"{_EXPERIMENTAL}/collectives/test_collectives.py"),
    Peer("sb2sb_allgather", f"{_EXPERIMENTAL}/collectives/test_sb2sb_allgather.py"),
    Peer("fg_allgather", f"{_EXPERIMENTAL}/collectives/test_fg_allgather.py"),
    Peer("fgcc", f"{_EXPERIMENTAL}/collectives/test_fgcc.py"),
    Peer(
        "find_nonzero_with_count",
        f"{_EXPERIMENTAL}/benchmark/test_find_nonzero_indices_with_count.py",
    ),
    Peer("topk_reduce", f"{_EXPERIMENTAL}/subkernels/test_topk_reduce.py"),
    Peer("conv1d", f"{_EXPERIMENTAL}/conv/test_conv1d.py", ("conv1d_basic<",)),
    Peer(
        "depthwise_conv1d",
        f"{_EXPERIMENTAL}/conv/test_depthwise_conv1d.py",
        ("all<1-16-", "fast<1-256-"),
    ),
    Peer(
        "cross_entropy_forward",
        f"{_EXPERIMENTAL}/loss/test_cross_entropy_forward.py",
        ("transformers_fast<", "gpt_oss_20b_fast<", "llama4_fast<"),
        {"B": 1, "T": 96, "V": 4000, "PB": 64, "CS": 1024},
    ),
    Peer(
        "cross_entropy_backward",
        f"{_EXPERIMENTAL}/loss/test_cross_entropy_backward.py",
        ("transformers_fast<",),
        {"B": 1, "T": 96, "V": 4000, "PB": 64, "CS": 1024},
    ),
    Peer(
        "attention_block_tkg",
        f"{_EXPERIMENTAL}/transformer/test_attention_block_tkg.py",
        ("megakernel<4-8-64-6144-",),
        {"H": 1024, "S_ctx": 1024, "S_max_ctx": 1024, "batch": 2, "q_heads": 2},
    ),
    Peer(
        "transformer_tkg",
        f"{_EXPERIMENTAL}/transformer/test_transformer_tkg.py",
        ("tkg<_manual_dims__tp-8_batch-[14]_S_tkg-1_S_ctx-1024_",),
        {"H": 1024, "I": 2048, "q_heads": 8, "S_ctx": 256},
    ),
    Peer(
        "bwmm_shard_on_H",
        f"{_EXPERIMENTAL}/moe/test_bwmm_shard_on_H.py",
        ("lnc2<*tok-1024_hid-7168_*bs-512", "lnc2<*tok-4096_hid-6144_int-336_*dt-bfloat16"),
        {"hid": 1024, "tok": 256, "int": 128, "exp": 4, "bs": 128, "k": 2},
    ),
    Peer(
        "bwmm_bwd",
        f"{_EXPERIMENTAL}/moe/test_bwmm_bwd.py",
        ("hid-2880_tok-4096_exp-2_", "hid-4096_tok-4096_exp-[24]_", "exp-1_"),
        {"hidden": 512, "tokens": 512, "intermediate": 256, "block_size": 512},
    ),
    Peer(
        "dynamic_elementwise_add",
        f"{_EXPERIMENTAL}/dynamic_shapes/test_dynamic_elementwise_add.py",
    ),
)

KNOWN = {
    "removed in 0.7": (
        "test_dynamic_elementwise_add_",
        "test_moe_cte_unified[_manual_cfg__impl-2_fn-5",
    ),
    "core_race": (
        "test_folded_load_store_dst_batch[lnc-2",
        "test_moe_blockwise_mm_bwd_shardH_affinityH_dropless_lnc2[",
        "test_attn_blk_megakernel[1-1-64-3072-",
    ),
    "capacity": (
        "test_rope_sweep[64-",
        "test_rope_manual[",
        "test_attn_blk_megakernel[1-16-128-16384-",
    ),
    "uninitialized_read": (
        "test_moe_blockwise_mm_kernel_lnc2[BWMMFunc.SHARD_ON_BLOCK-3072-1024-8-256-4-384-bfloat16-3-",
    ),
    "": (
        "test_moe_cte_unified[_manual_cfg__impl-2_fn-5",
        "test/integration/nkilib/experimental/subkernels/test_topk_reduce.py",
    ),
}
"""Tests that a rule refuses rightly, by rule: reported, and run with that rule at "warn"; under ""
tests that cannot run. docs/third_party_kernels.md says why.
"""
