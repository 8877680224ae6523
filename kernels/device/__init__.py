"""The device side of the kernels: NKI only."""
