"""Tests that need torch or JAX: make test-frameworks runs them in an environment of its own."""
