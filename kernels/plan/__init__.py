"""What a launch needs to know beforehand: NumPy only."""
