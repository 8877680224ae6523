"""NumPy interpreter of the NKI 0.6.0 instruction set for trn2."""
