"""Pieces of the decode kernel: the host's plan of a step, and what runs per group of requests."""
