"""Modelled times of the kernels."""
