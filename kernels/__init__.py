"""Attention kernels for Trainium2, hand-written in NKI, and their host-level functions."""

from .launch import padded_prefill, paged_decode, segmented_attention, write_kv_cache

__all__ = ["padded_prefill", "paged_decode", "segmented_attention", "write_kv_cache"]
