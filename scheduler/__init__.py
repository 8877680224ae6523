"""Scheduler with the decisions of vLLM 0.24 and the Neuron rules."""
