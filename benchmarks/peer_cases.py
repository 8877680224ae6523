"""Which tests of nki-library the peers benchmark runs: all kernels, sizes that a laptop takes."""

from dataclasses import dataclass
from fnmatch import fnmatchcase

_CORE = "test/integration/nkilib/core"


@dataclass(frozen=True)
class Peer:
    """A kernel, its test file, and shell patterns of the tests to run ("" is all)."""

    name: str
    path: str
    select: tuple[str, ...] = ("*",)

    def selects(self, test: str) -> bool:
        """Whether a test (with its parameters in brackets) is one of those to run."""
        # fnmatch takes brackets for character classes.
        name = test.replace("[", "<").replace("]", ">")
        return any(fnmatchcase(name, f"*{pattern}*") for pattern in self.select)


PEERS = (
    Peer("attention_cte", f"{_CORE}/attention/test_attention_cte.py"),
    Peer("attention_tkg", f"{_CORE}/attention/test_attention_tkg.py"),
    Peer("gen_mask_tkg", f"{_CORE}/attention/test_gen_mask_tkg.py"),
    Peer("rope", f"{_CORE}/embeddings/test_rope.py", ("test_rope_fast",)),
    Peer("rope_hf", f"{_CORE}/embeddings/test_rope_hf.py"),
    Peer("rmsnorm_quant", f"{_CORE}/rmsnorm/test_rmsnorm_quant.py"),
    Peer("cumsum", f"{_CORE}/cumsum/test_cumsum.py", ("test_cumsum_fast",)),
    Peer("cascaded_max", f"{_CORE}/max/test_cascaded_max.py", ("test_cascaded_max_unit",)),
    Peer("cascaded_max_utils", f"{_CORE}/max/test_cascaded_max_utils.py"),
    Peer("router_topk", f"{_CORE}/router_topk/test_router_topk.py"),
    Peer("find_nonzero_indices", f"{_CORE}/subkernels/test_find_nonzero_indices.py"),
    Peer("qkv_cte", f"{_CORE}/qkv/test_qkv_cte.py"),
    Peer("qkv_tkg", f"{_CORE}/qkv/test_qkv_tkg.py"),
    Peer("mlp_cte", f"{_CORE}/mlp/test_mlp_cte.py"),
    Peer("mlp_tkg", f"{_CORE}/mlp/test_mlp_tkg.py"),
    Peer("output_projection_cte", f"{_CORE}/output_projection/test_output_proj_cte.py"),
    Peer("output_projection_tkg", f"{_CORE}/output_projection/test_output_proj_tkg.py"),
)

# Upstream tests in which both cores write the same bytes (each zeroes the whole output): reported,
# and run with that rule at "warn".
KNOWN_RACES = ("test_folded_load_store_dst_batch[lnc-2",)
