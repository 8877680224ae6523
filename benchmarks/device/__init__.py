"""Kernels on a Neuron device."""
