"""Every reachable state of small Neuron schedulers."""
