"""Hand-written NKI attention kernels and their host-level functions."""
