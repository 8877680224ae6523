"""LLM attention kernels, scheduler and runner for AWS Trainium2, with a NumPy reference."""

__version__ = "0.1.0"
