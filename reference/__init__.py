"""NumPy definitions of everything that the other floors do."""
