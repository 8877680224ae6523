"""Pieces of the prefill and segment kernels: streams of keys, softmax forms, shares of a chunk."""
