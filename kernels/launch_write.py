"""The host function of the cache write: arguments checked, one launch."""

from typing import Any

from .addresses import check_slots
from .arrays import array_kind, read_optional
from .cache_layout import written_in_place
from .device.write_kv_cache_nki import write_kv_cache_kernel
from .launch import Launch, launched
from .plan.cache_writes import write_arguments
from .shape_checks import check_apart, check_caches, check_value_rows, check_written_rows
from .validation import check_cache_scale, check_dtypes, check_integers, check_shape, device_fp8


def prepare_write_kv_cache(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    slot_mapping: Any,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
    k_pre_transposed: bool = False,
) -> Launch[tuple[Any, Any]]:
    """Store row t of k and v [KV, T, d] in slot slot_mapping[t]; -1 is not written.

    caches [num_blocks, KV, block_size, d]; slot_mapping [T] int32. T is at least 1,
    T * (KV + 4) at most 350,000, KV * d at most 16,384. Options as of the attention functions.
    The launch, or `write_kv_cache` of the same arguments, writes the caches and gives them.
    """
    kind = array_kind(k=k, v=v, k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping)
    k_, v_, slots = map(kind.read, (k, v, slot_mapping))
    k_rows, v_rows = kind.open_cache(k_cache), kind.open_cache(v_cache)
    check_shape("k", k_, (None, None, None), "KV, T, d")
    check_value_rows(v_, k_)
    check_written_rows("k", k_)
    check_written_rows("v", v_)
    check_caches(k_rows, v_rows, k_.shape[0], k_.shape[2], k_pre_transposed, v_.shape[2])
    check_dtypes(k_.dtype, {"v": v_}, {"k_cache": k_rows, "v_cache": v_rows})
    check_apart(k_rows, v_rows, k=k_, v=v_)
    caches = written_in_place(k_rows, v_rows, k_pre_transposed)
    slots = check_integers("slot_mapping", slots, (k_.shape[1],))
    check_slots(slots, v_rows)
    writes, key_writes = write_arguments(
        caches.slots(slots), k_, v_.shape[2], caches.page_size, k_pre_transposed
    )
    arrays = (
        k_, v_, device_fp8(caches.k), device_fp8(caches.v), *writes,
        check_cache_scale("k_scale", read_optional(kind, k_scale), k_rows),
        check_cache_scale("v_scale", read_optional(kind, v_scale), v_rows),
        *key_writes,
    )  # fmt: skip

    def finish(_: Any) -> tuple[Any, Any]:
        return kind.close_cache(k_cache, k_rows), kind.close_cache(v_cache, v_rows)

    return Launch(write_kv_cache_kernel, 1, arrays, finish)


write_kv_cache = launched(prepare_write_kv_cache)
"""Store keys and values in the caches: `prepare_write_kv_cache`, run at once."""
