"""Measurements, each started as `python -m segattn.benchmarks.NAME`."""
