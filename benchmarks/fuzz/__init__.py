"""Random work on a scheduler and on the NumPy model, compared."""
