"""Faults put into the scheduler, and who notices."""
