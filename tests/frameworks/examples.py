"""Which examples need a framework, and how far their results may be from what they compare with."""

FRAMEWORK_EXAMPLES = {"torch_operators.py": 5e-3, "torch_compiled.py": 1e-5, "jax_jit.py": 1e-5}
